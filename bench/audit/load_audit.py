"""The audit of a load: the checker judges the journals against the topics (docs/checker.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import msgspec

from bench.audit.journal import history
from bench.load.wire import payloads
from checker.content import Content, content_of
from checker.dump import ends, read_topics
from checker.judge import Verdict, judge

_SHOWN: Final = 5


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """The number of the checker's findings by kind.

    `missing`: acknowledged, but missing, incomplete, or with other bytes. `doubled`: written more than once. `extra`:
    of no prepared transaction whose commit was sent. `contradicted`: two outcomes. `stuck`: no outcome.
    """

    missing: int
    doubled: int
    extra: int
    contradicted: int
    stuck: int

    @property
    def counts(self) -> dict[str, int]:
        """The number of findings of each kind."""
        return {kind: getattr(self, kind) for kind in Findings.__struct_fields__}

    @property
    def found(self) -> int:
        """The number of findings of all kinds."""
        return sum(self.counts.values())

    @property
    def clean(self) -> bool:
        """Whether the topics contain exactly what was acknowledged."""
        return not self.found

    @property
    def shown(self) -> str:
        """The number of findings of each kind, as text."""
        return ", ".join(f"{count} {kind}" for kind, count in self.counts.items())


class Audit(Findings, frozen=True, kw_only=True):
    """The checker's findings, and the number of judged transactions."""

    transactions: int
    first: tuple[str, ...] = ()

    @classmethod
    def of(cls, verdict: Verdict) -> Self:
        """Count the checker's findings."""
        counts = Counter(finding.count for finding in verdict.findings)
        return cls(
            transactions=verdict.transactions,
            missing=counts["lost"] + counts["torn"],
            doubled=counts["doubled"],
            extra=counts["leaked"],
            contradicted=counts["contradicted"],
            stuck=counts["stuck"],
            first=tuple(
                f"{finding.count} {finding.rule} {finding.id}: {'; '.join(finding.evidence)}"
                for finding in verdict.findings[:_SHOWN]
            ),
        )


class Auditor:
    """Judges everything that is written after its creation; only the load may write to the topic."""

    def __init__(self, bootstrap_servers: str, *, prefix: str, topic: str) -> None:
        """Record the end offsets of the topics."""
        self._servers = bootstrap_servers
        self._prefix = prefix
        self._topic = topic
        self._start_offsets = ends(bootstrap_servers, prefix=prefix, topics=[topic])

    def audit(self, journals: Sequence[Path]) -> Audit:
        """Judge the topics by the journals of the load."""
        contents = [content(self._topic, key, value) for key, value in payloads()]
        records = read_topics(self._servers, prefix=self._prefix, topics=[self._topic], since=self._start_offsets)
        return Audit.of(judge(history(journals, self._topic, contents), records))


def content(topic: str, key: str, value: str) -> Content:
    """Return the hashes of a message, as the checker computes them."""
    return content_of(topic, key.encode(), value.encode())
