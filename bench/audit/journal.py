"""A compact journal of a load, and its conversion to the checker's history.

One line per transaction, written when its result is known to the caller. The content is a number, because the load
repeats a few messages. A transaction without a line was never sent, or was refused (429): if it is in a topic, the
checker finds a message or a half that nobody prepared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Final

from bench.plan import GROUP
from checker.content import Content
from checker.history import AnyEvent, End, Ended, Prepare, Prepared, Rest, Run

COMMITTED: Final = b"+"
UNCONFIRMED: Final = b"?"
UNANSWERED: Final = b"!"
ROLLED_BACK: Final = b"-"

_CREATED: Final = 201
_OK: Final = 200
_STEPS: Final = 4

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

    def unanswered(self, contents: Iterable[int], *, brought: bytes = b"") -> None:
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
