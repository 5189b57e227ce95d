"""The system that faults are injected into, and the record of those that took effect."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Any, Final

from checker.history import Fault, HistoryWriter
from tests.chaos.brokers import BrokerCluster
from tests.chaos.caller import Caller
from tests.chaos.coordinators import Instance
from tests.chaos.follower import Follower
from tests.chaos.network_process import NetworkProcess

SHARDS: Final = 6
SESSION_S: Final = 6.0
"""Longer than the brokers need to detect that one of them is gone."""
RECOVERING: Final = 0.2
"""How often a fault hits a coordinator that may not be ready yet."""
LOOK_AGAIN_S: Final = 0.1
_PATIENCE_S: Final = 10.0
"""How long to wait for one that should serve; then it is hit as it is."""

Kind = Callable[[], Awaitable[None]]


class Stage:
    """The parts with faults: one fault at a time for each side, the sides concurrently."""

    def __init__(
        self,
        cluster: BrokerCluster,
        instances: Sequence[Instance],
        networks: Mapping[int, NetworkProcess],
        caller: Caller,
        history: HistoryWriter,
        chance: random.Random,
        *,
        follower: Follower,
        away: Callable[[], Collection[int]],
        holding: Callable[[], AbstractAsyncContextManager[None]],
        clock_steps_s: Sequence[float],
        horizon_s: float,
        long: bool,
    ) -> None:
        """Keep the parts.

        `away` returns the unserved shards, `holding` keeps transactions pending, `clock_steps_s` are the steps by which
        clocks may be set ahead, outcomes are remembered for `horizon_s`, and a `long` run has long faults too.
        """
        self.away = away
        self.holding = holding
        self.cluster = cluster
        self.instances = instances
        self.networks = networks
        self.caller = caller
        self.chance = chance
        self.follower = follower
        self.clock_steps_s = clock_steps_s
        self.horizon_s = horizon_s
        self.long = long
        self.admitted: list[str] = []
        """Revoked keys that an instance has accepted, and deletions that it has not noticed."""
        self._history = history
        self.coordinators_free = asyncio.Lock()
        self.brokers_free = asyncio.Lock()
        self.is_over = asyncio.Event()
        self.lull_until = 0.0
        """No transaction begins before this time on the loop's clock."""
        self.happened: Counter[str] = Counter()
        """Faults that took effect, by kind."""
        self.played: Counter[str] = Counter()
        """Played faults by kind, whether or not they took effect."""
        self.at_once: Counter[str] = Counter()
        """Pairs of kinds that were in effect at the same time."""
        self.coordinator_faults = 0
        """How many faults of coordinators have begun or ended."""
        self._playing: list[str] = []

    async def wait(self, seconds: float) -> None:
        """Wait, but not beyond the end of all faults."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.is_over.wait(), seconds)

    def now(self) -> int:
        return self._history.now()

    def between(self, least: float, most: float) -> float:
        return self.chance.uniform(least, most)

    def note(
        self,
        kind: str,
        target: str,
        *,
        counts: bool,
        since: int | None = None,
        stops_ms: int | None = None,
        **detail: Any,
    ) -> None:
        """Record a fault that is over."""
        since = self.now() if since is None else since
        self._history.write(
            Fault(kind=kind, target=target, counts=counts, since=since, stops_ms=stops_ms, detail=detail)
        )
        self.played[kind] += 1
        if counts:
            self.happened[kind] += 1

    @contextmanager
    def playing(self, kind: str) -> Iterator[None]:
        """Mark a fault as being played, to count simultaneous ones of the other sides."""
        self.at_once.update(" and ".join(sorted((kind, other))) for other in self._playing)
        self._playing.append(kind)
        try:
            yield
        finally:
            self._playing.remove(kind)

    def busy(self, instance: Instance) -> int:
        """Return the number of a coordinator's unanswered requests."""
        return self.caller.in_flight[instance.number]

    async def until_busy(self, instance: Instance) -> None:
        for _ in range(30):
            if self.busy(instance) > 0:
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    async def until_idle(self, instance: Instance) -> None:
        for _ in range(round(_PATIENCE_S / LOOK_AGAIN_S)):
            if not self.busy(instance):
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    async def some_instance(self, *others: Instance) -> Instance | None:
        """Choose a running one that is not in `others`: usually one that serves, sometimes one that still recovers."""
        running = [
            candidate
            for candidate in self.instances
            if candidate.running and not candidate.paused and candidate not in others
        ]
        if not running:
            return None
        chosen = self.chance.choice(running)
        if self.chance.random() < RECOVERING:
            return chosen
        patience = asyncio.get_running_loop().time() + _PATIENCE_S
        while asyncio.get_running_loop().time() < patience:
            if await asyncio.to_thread(chosen.is_ready):
                break
            await asyncio.sleep(LOOK_AGAIN_S)
        return chosen
