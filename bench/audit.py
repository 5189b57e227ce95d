"""What callers asked and were told, against what the topics hold: judged by the checker (docs/checker.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import msgspec

from bench.journal import history
from bench.wire import payloads
from checker.content import Content, content_of
from checker.dump import ends, read_topics
from checker.judge import Verdict, judge

_SHOWN: Final = 5


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """How many findings the checker had.

    `missing`: acknowledged and not there, or not all of it, or with other bytes. `doubled`: there more than once.
    `extra`: of no transaction that was prepared and whose commit was sent. `contradicted`: two outcomes. `stuck`:
    without an outcome.
    """

    missing: int
    doubled: int
    extra: int
    contradicted: int
    stuck: int

    @property
    def counts(self) -> dict[str, int]:
        """The number of each kind."""
        return {kind: getattr(self, kind) for kind in Findings.__struct_fields__}

    @property
    def found(self) -> int:
        """The number of all kinds together."""
        return sum(self.counts.values())

    @property
    def clean(self) -> bool:
        """Whether everything stands exactly as it was acknowledged."""
        return not self.found

    @property
    def shown(self) -> str:
        """The number of each kind, for a person."""
        return ", ".join(f"{count} {kind}" for kind, count in self.counts.items())


class Audit(Findings, frozen=True, kw_only=True):
    """What the checker found, of how many transactions."""

    transactions: int
    first: tuple[str, ...] = ()

    @classmethod
    def of(cls, verdict: Verdict) -> Self:
        """Sort the checker's findings."""
        counts = Counter(finding.count for finding in verdict.findings)
        return cls(
            transactions=verdict.transactions,
            missing=counts["lost"] + counts["torn"],
            doubled=counts["doubled"],
            extra=counts["leaked"],
            contradicted=counts["contradicted"],
            stuck=counts["stuck"],
            first=tuple(
                f"{one.count} {one.rule} {one.id}: {'; '.join(one.evidence)}" for one in verdict.findings[:_SHOWN]
            ),
        )


class Auditor:
    """Judges what is written from when it is made on; nobody else may write to the topic."""

    def __init__(self, bootstrap_servers: str, *, prefix: str, topic: str) -> None:
        """Remember where the topics end."""
        self._servers = bootstrap_servers
        self._prefix = prefix
        self._topic = topic
        self._began = ends(bootstrap_servers, prefix=prefix, topics=[topic])

    def audit(self, journals: Sequence[Path]) -> Audit:
        """Judge the topics by what the load wrote down."""
        contents = [content(self._topic, key, value) for key, value in payloads()]
        records = read_topics(self._servers, prefix=self._prefix, topics=[self._topic], since=self._began)
        return Audit.of(judge(history(journals, self._topic, contents), records))


def content(topic: str, key: str, value: str) -> Content:
    """Return what the checker knows of a message."""
    return content_of(topic, key.encode(), value.encode())
