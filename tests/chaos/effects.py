"""The effects of a run's faults: faults, simultaneous pairs, limits that were reached, records cleaned away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from checker.dump import Topics
from tests.chaos.follower import Follower
from tests.chaos.stage import Stage

_LIMITS: Final = ("429", "413")
_INTERNAL: Final = ("half", "op", "parked")


@dataclass(frozen=True, kw_only=True)
class Effects:
    """Figures of one run."""

    played: Mapping[str, int]
    """Faults by kind, whether or not they took effect."""
    happened: Mapping[str, int]
    at_once: Mapping[str, int]
    """Pairs of faults that were in effect at the same time."""
    cleaned: Mapping[str, int]
    """Records that were read during the run and did not exist at its end, by kind."""
    gave_up: Mapping[str, int]
    """How often policy parked or rolled back, by its reason."""
    refused: Mapping[str, int]
    """Answers that report a reached limit, or a topic that cannot be written to."""
    refused_late: int
    """Prepares of ended ids, past the horizon, that were refused."""
    forgotten: Mapping[str, int]
    """Undeleted partitions for which a bug in Kafka lost transactions."""

    @classmethod
    def of(
        cls,
        follower: Follower,
        remaining: Topics,
        stage: Stage,
        answers: Mapping[str, int],
        refused_late: int,
        forgotten: Mapping[str, int],
    ) -> Self:
        """Read the remaining records, and compare."""
        remaining_counts = Counter(type(record).__name__.lower() for record in remaining.read())
        return cls(
            played=dict(stage.played),
            happened=dict(stage.happened),
            at_once=dict(stage.at_once),
            cleaned={kind: follower.records[kind] - remaining_counts[kind] for kind in _INTERNAL},
            gave_up=dict(follower.reasons),
            refused={
                what: times
                for what, times in sorted(answers.items())
                if what.startswith(_LIMITS) or what.endswith(("topic_unavailable", "not_authorised"))
            },
            refused_late=refused_late,
            forgotten=dict(forgotten),
        )

    def summary(self) -> dict[str, object]:
        """Return the figures for the JSON line."""
        return {
            "at_once": sum(self.at_once.values()),
            "cleaned": dict(self.cleaned),
            "gave_up": dict(self.gave_up),
            "refused": dict(self.refused),
            "refused_late": self.refused_late,
            "forgotten_by_kafka": dict(self.forgotten),
        }

    def lines(self, without_effect: Sequence[str]) -> Iterator[str]:
        """Print the figures."""
        yield f"faults that took effect, of those played: {_listed(self.happened, self.played)}"
        if without_effect:
            yield f"without effect: {', '.join(without_effect)}"
        yield f"two at once: {_listed(self.at_once)}"
        yield f"policy gave up: {_listed(self.gave_up)}"
        yield f"refused: {_listed(self.refused)}"
        yield f"cleaned away: {_listed(self.cleaned)}; refused past the horizon: {self.refused_late}"
        if self.forgotten:
            yield f"Kafka forgot transactions in partitions without a leader: {_listed(self.forgotten)}"


def _listed(counts: Mapping[str, int], of: Mapping[str, int] | None = None) -> str:
    if not counts:
        return "none"
    names = sorted(counts if of is None else of)
    return ", ".join(f"{counts.get(name, 0)}{'' if of is None else f'/{of[name]}'} x {name}" for name in names)
