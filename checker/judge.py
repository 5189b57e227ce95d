"""The verdict on a whole run: applies every rule to every transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from checker.cases import gather
from checker.history import AnyEvent, Fault, Rest, Run
from checker.records import AnyRecord
from checker.rules import COUNTS, RULES, Finding, foreign
from checker.waits import Waits


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run."""

    transactions: int
    """Transactions with an acknowledged prepare, a record or a message."""
    committed: int
    rolled_back: int
    faults: dict[str, int]
    """Faults that took effect, by kind."""
    findings: tuple[Finding, ...]
    complete: bool
    """Whether the history is complete; without its end there is no verdict."""
    seed: int | None
    excused: int = 0
    """Transactions that nobody can judge: Kafka lost them while the only other copy, in memory, went."""
    waits: dict[str, object] = {}
    """How long acknowledged calls took, and how long each shard was unserved."""

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return self.complete and not self.findings

    def summary(self) -> dict[str, object]:
        """Return the result for the JSON line, with the number of findings for each count."""
        counts = Counter(finding.count for finding in self.findings)
        return {
            "transactions": self.transactions,
            "committed": self.committed,
            "rolled_back": self.rolled_back,
            "faults": self.faults,
            "excused": self.excused,
            **{count: counts[count] for count in COUNTS},
            **self.waits,
            "complete": self.complete,
            "seed": self.seed,
        }


def judge(events: Iterable[AnyEvent], records: Iterable[AnyRecord]) -> Verdict:
    """Judge the history of a run and the topics' contents after it; both are read once, as streams."""
    run = _Run()
    evidence = gather(run.of(events), records)
    cases = evidence.cases.values()
    findings = [finding for case in cases if not case.lost_in_memory for rule in RULES for finding in rule(case)]
    findings += map(foreign, evidence.strays)
    findings += run.waits.findings()
    known = [case for case in cases if case.acknowledged or case.halves or case.ops or case.messages]
    outcomes = Counter(outcome for case in known for outcome in case.outcomes)
    return Verdict(
        transactions=len(known),
        committed=outcomes["committed"],
        rolled_back=outcomes["rolled_back"],
        faults=dict(run.faults),
        excused=sum(case.lost_in_memory for case in known),
        findings=tuple(findings),
        complete=isinstance(run.first, Run) and isinstance(run.last, Rest),
        seed=run.seed,
        waits=run.waits.figures(),
    )


class _Run:
    """Facts about the run as a whole, from its history."""

    def __init__(self) -> None:
        self.first: AnyEvent | None = None
        self.last: AnyEvent | None = None
        self.seed: int | None = None
        self.faults: Counter[str] = Counter()
        self.waits = Waits()

    def of(self, events: Iterable[AnyEvent]) -> Iterator[AnyEvent]:
        """Yield the events, and record facts from them."""
        for event in events:
            if self.first is None:
                self.first = event
            if isinstance(event, Run) and self.seed is None:
                self.seed = event.seed
            if isinstance(event, Fault) and event.counts:
                self.faults[event.kind] += 1
            self.waits.take(event)
            self.last = event
            yield event
