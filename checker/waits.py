"""How long callers waited and shards were unserved, and whether faults explain it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from checker.disturbances import Disturbances
from checker.history import AnyEvent, Ended, Fault, Held, Looked, Prepared, Serving
from checker.rules import Finding

SLACK_MS: Final = 90_000
"""Waits up to this long need no fault: sessions expire and shards are recovered, also on a slow machine."""
_OK: Final = range(200, 300)


class Waits:
    """Collects the events of a run, and then reports how long calls and moves of shards took."""

    def __init__(self) -> None:
        """Start empty."""
        self._disturbances = Disturbances()
        self._took: list[int] = []
        self._long: list[tuple[int, int, int, str]] = []
        self._held: list[Held] = []
        self._line = 0
        self._now = 0

    def take(self, event: AnyEvent) -> None:
        """Add the next event."""
        self._line += 1
        self._now = max(self._now, event.at)
        match event:
            case Fault() | Serving():
                self._disturbances.add(event)
            case Held():
                self._held.append(event)
            case Prepared() | Ended() | Looked() if event.status in _OK:
                took = event.at - event.sent_at
                self._took.append(took)
                if took > SLACK_MS:
                    name = event.ref if isinstance(event, Prepared) else event.id
                    self._long.append((self._line, event.sent_at, event.at, name))
            case _:
                pass

    def figures(self) -> dict[str, object]:
        """Return the figures for the JSON line, in seconds."""
        took = sorted(self._took)
        away = {
            shard: [until - since for since, until in times]
            for shard, times in self._disturbances.unserved(self._now).items()
        }
        return {
            "calls_s": {
                "acknowledged": len(took),
                **{name: _seconds(_share(took, share)) for name, share in (("p50", 0.5), ("p99", 0.99), ("most", 1))},
            },
            "away_s": {
                "most": _seconds(max((max(times) for times in away.values() if times), default=0)),
                "shards": {
                    str(shard): {"times": len(times), "most": _seconds(max(times)), "all": _seconds(sum(times))}
                    for shard, times in sorted(away.items())
                },
            },
        }

    def findings(self) -> Iterator[Finding]:
        """Yield the waits that no fault explains, and those that never ended."""
        for held in self._held:
            place = f"{held.topic}[{held.partition}]"
            evidence = (
                place,
                f"cannot be read to {held.end}: a Kafka transaction hangs there",
                *filter(None, [held.why]),
            )
            yield Finding(count="stuck", rule="consumers_are_held_back", id="", evidence=evidence)
        for line, since, until, name in self._long:
            unexplained = self._disturbances.unexplained(since, until, of_shards=False)
            if unexplained > SLACK_MS:
                yield _late("call_took_long_without_a_fault", name, f"line {line}", since, until, unexplained)
        for shard, times in self._disturbances.unserved(self._now).items():
            for since, until in times:
                unexplained = self._disturbances.unexplained(since, until, of_shards=True)
                if unexplained > SLACK_MS:
                    yield _late("shard_was_away_without_a_fault", "", f"shard {shard}", since, until, unexplained)


def _late(rule: str, name: str, what: str, since: int, until: int, unexplained: int) -> Finding:
    evidence = (
        what,
        f"{_seconds(until - since)} s, from {since} to {until}",
        f"{_seconds(unexplained)} s without a fault that explains it",
    )
    return Finding(count="late", rule=rule, id=name, evidence=evidence)


def _share(ordered: Sequence[int], share: float) -> int:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0


def _seconds(milliseconds: int) -> float:
    return round(milliseconds / 1000, 1)
