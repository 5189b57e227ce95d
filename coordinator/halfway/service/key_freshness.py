"""Whether this instance still hears what happens to keys: one that does not would take a revoked key for good."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from halfway.domain.errors import KafkaUnavailableError

if TYPE_CHECKING:
    from halfway.service.ports import KeyStore

log = structlog.get_logger(__name__)

NOT_READY_S: Final = 5.0
"""An instance that has not read the keys to their end for this long is not ready."""
REFUSED_S: Final = 30.0
"""After this long it takes no key any more, but the first operator's."""
_EVERY_S: Final = 1.0
_WITHIN_S: Final = 5.0


class KeyFreshness:
    """Reads the keys to their end again and again, and knows when that was last done."""

    def __init__(
        self,
        store: KeyStore,
        *,
        not_ready_s: float = NOT_READY_S,
        refused_s: float = REFUSED_S,
        every_s: float = _EVERY_S,
    ) -> None:
        """Keep the store, whose keys were just read; nothing is asked before `watch`."""
        self._store = store
        self._not_ready_s = not_ready_s
        self._refused_s = refused_s
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._read_at = self._loop.time()
        self._said = False

    @property
    def age_s(self) -> float:
        """For how long a key may have been revoked that is still taken here."""
        return max(0.0, self._loop.time() - self._read_at)

    @property
    def late(self) -> bool:
        """Whether this instance should get no requests."""
        return self.age_s > self._not_ready_s

    def demand(self) -> None:
        """Raise KafkaUnavailableError if the keys are too old to let anybody in by them."""
        age_s = self.age_s
        if age_s > self._refused_s:
            raise KafkaUnavailableError(
                f"this instance has not been able to read for {age_s:.0f} s which keys were revoked, and takes none "
                "now: try again, or at another instance"
            )

    async def watch(self) -> None:
        """Read again and again; say once in the log if that fails for long, and if it succeeds again."""
        while True:
            began = self._loop.time()
            try:
                await self._store.refresh(deadline=began + _WITHIN_S)
            except KafkaUnavailableError as error:
                if self.late and not self._said:
                    self._said = True
                    log.warning("keys_not_current", refused_after_s=self._refused_s, error=error.detail)
            else:
                self._read_at = began
                if self._said:
                    self._said = False
                    log.info("keys_current_again")
            await asyncio.sleep(self._every_s)
