"""Tracks how recently this instance has read the keys: without new records it would accept revoked keys."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from halfway.domain.errors import KafkaUnavailableError
from halfway.service.elapsed import Instant

if TYPE_CHECKING:
    from halfway.service.ports import KeyStore

log = structlog.get_logger(__name__)

NOT_READY_S: Final = 5.0
"""An instance that has not read the keys to the end of their topic for this long is not ready."""
REFUSED_S: Final = 30.0
"""After this long it accepts no key except the first operator's."""
_EVERY_S: Final = 1.0
_WITHIN_S: Final = 5.0


class KeyFreshness:
    """Reads the keys to the end of their topic at a fixed interval, and tracks when it last succeeded."""

    def __init__(
        self,
        store: KeyStore,
        *,
        not_ready_s: float = NOT_READY_S,
        refused_s: float = REFUSED_S,
        every_s: float = _EVERY_S,
    ) -> None:
        """Take the store, whose keys were just read. Nothing is read before `watch`."""
        self._store = store
        self._not_ready_s = not_ready_s
        self._refused_s = refused_s
        self._every_s = every_s
        self._read_at = Instant.now()
        self._warned = False

    @property
    def age_s(self) -> float:
        """The longest time for which this instance may have missed a revocation."""
        return max(0.0, self._read_at.age_s)

    @property
    def is_late(self) -> bool:
        """Return whether this instance should get no requests."""
        return self.age_s > self._not_ready_s

    def require_fresh(self) -> None:
        """Raise KafkaUnavailableError if the keys were read too long ago to accept any of them."""
        age_s = self.age_s
        if age_s > self._refused_s:
            raise KafkaUnavailableError(
                f"this instance could not read for {age_s:.0f} s which keys were revoked, and accepts no key now: "
                "try again, or call another instance"
            )

    async def watch(self) -> None:
        """Read at a fixed interval. Log once if that fails for long, and once when it succeeds again."""
        loop = asyncio.get_running_loop()
        while True:
            started = Instant.now()
            try:
                await self._store.refresh(deadline=loop.time() + _WITHIN_S)
            except KafkaUnavailableError as error:
                if self.is_late and not self._warned:
                    self._warned = True
                    log.warning("keys_not_current", refused_after_s=self._refused_s, error=error.detail)
            else:
                self._read_at = started
                if self._warned:
                    self._warned = False
                    log.info("keys_current_again")
            await asyncio.sleep(self._every_s)
