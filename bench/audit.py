"""Judges a load: its journal becomes a history, and the checker compares that with the topics (docs/verification.md).

One line per transaction, written when its result is known to the caller. The content is a number, because the load
repeats a few messages. A transaction without a line was never sent, or was refused (429): if it is in a topic, the
checker finds a message or a half that nobody prepared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Final, Self

import msgspec

from bench.plan import GROUP
from checker.content import Content, content_of
from checker.dump import ends, read_topics
from checker.history import AnyEvent, End, Ended, Prepare, Prepared, Rest, Run
from checker.judge import Verdict, judge

COMMITTED: Final = b"+"
UNANSWERED: Final = b"!"
ROLLED_BACK: Final = b"-"
_CREATED: Final = 201
_OK: Final = 200
_STEPS: Final = 4
_SHOWN: Final = 5

SentTransaction = tuple[int, bytes]
"""A transaction: the number of its content, and its id."""


class Journal:
    """Records the results of transactions."""

    def __init__(self, file: IO[bytes]) -> None:
        """Write to a buffered file."""
        self._write = file.write

    def committed(self, transactions: Iterable[SentTransaction]) -> None:
        """Record transactions whose commit was confirmed."""
        for transaction in transactions:
            self._write(b"+%d %b\n" % transaction)

    def unconfirmed(self, transactions: Iterable[SentTransaction]) -> None:
        """Record prepared transactions whose commit may have been sent and was not confirmed."""
        for transaction in transactions:
            self._write(b"?%d %b\n" % transaction)

    def unanswered(self, contents: Iterable[int], brought: bytes = b"") -> None:
        """Record prepares that may be stored or not; `brought` is the id if the caller chose it."""
        for content in contents:
            self._write(b"!%d %b\n" % (content, brought))

    def rolled_back(self, ids: Iterable[bytes]) -> None:
        """Record transactions that are about to be rolled back, because no caller waits for them any more."""
        for transaction_id in ids:
            self._write(b"-0 %b\n" % transaction_id)


def history(paths: Sequence[Path], topic: str, contents: Sequence[Content]) -> Iterator[AnyEvent]:
    """Yield the events of journals, from `run` to `rest`.

    The times are artificial: each transaction has its own period, in which its steps follow each other.
    """
    yield Run(seed=0, topics=(topic,))
    number = 0
    for path in paths:
        with path.open("rb") as file:
            for line in file:
                number += 1
                yield from _events(line.decode(), number, contents)
    yield Rest(at=(number + 1) * _STEPS)


def _events(line: str, number: int, contents: Sequence[Content]) -> Iterator[AnyEvent]:
    mark, content, transaction_id = line[0].encode(), *line[1:].rstrip("\n").split(" ")
    ref, at = str(number), number * _STEPS
    requested = (contents[int(content)],)
    if mark == ROLLED_BACK:
        yield End(at=at, id=transaction_id, outcome="rollback", by="operator")
        return
    if mark == UNANSWERED:
        yield Prepare(at=at, ref=ref, group=GROUP, contents=requested, id=transaction_id or None)
        yield Prepared(at=at + 1, sent_at=at, ref=ref, status=0)
        return
    yield Prepare(at=at, ref=ref, group=GROUP, contents=requested)
    yield Prepared(at=at + 1, sent_at=at, ref=ref, status=_CREATED, id=transaction_id, state="prepared")
    yield End(at=at + 2, id=transaction_id, outcome="commit")
    confirmed = mark == COMMITTED
    yield Ended(
        at=at + 3,
        sent_at=at + 2,
        id=transaction_id,
        outcome="commit",
        status=_OK if confirmed else 0,
        state="committed" if confirmed else None,
    )


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """The number of judged transactions, and of the checker's findings by kind.

    `missing`: acknowledged, but missing, incomplete, or with other bytes. `doubled`: written more than once. `extra`:
    of no prepared transaction whose commit was sent. `contradicted`: two outcomes. `stuck`: no outcome.
    """

    transactions: int = 0
    missing: int = 0
    doubled: int = 0
    extra: int = 0
    contradicted: int = 0
    stuck: int = 0
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

    @classmethod
    def sum(cls, audits: Sequence[Audit]) -> Self:
        """Return the findings of several audits together."""
        counts = {name: sum(getattr(audit, name) for audit in audits) for name in ("transactions", *_KINDS)}
        return cls(**counts, first=tuple(first for audit in audits for first in audit.first))

    @property
    def found(self) -> dict[str, int]:
        """The number of findings of each kind."""
        return {kind: getattr(self, kind) for kind in _KINDS}

    @property
    def clean(self) -> bool:
        """Whether the topics contain exactly what was acknowledged."""
        return not any(self.found.values())


_KINDS: Final = ("missing", "doubled", "extra", "contradicted", "stuck")


class Auditor:
    """Judges everything that is written after its creation; only the load may write to the topic."""

    def __init__(self, bootstrap_servers: str, *, prefix: str, topic: str) -> None:
        """Record the end offsets of the topics."""
        self._servers = bootstrap_servers
        self._prefix = prefix
        self._topic = topic
        self._start_offsets = ends(bootstrap_servers, prefix=prefix, topics=[topic])

    def audit(self, journals: Sequence[Path], payloads: Sequence[tuple[str, str]]) -> Audit:
        """Judge the topics by the journals of the load, whose messages have these keys and values."""
        contents = [content_of(self._topic, key.encode(), value.encode()) for key, value in payloads]
        records = read_topics(self._servers, prefix=self._prefix, topics=[self._topic], since=self._start_offsets)
        return Audit.of(judge(history(journals, self._topic, contents), records))
