"""What a load asked and was told, in few bytes, and the checker's history that it stands for.

One line a transaction, written when its fate is known to the caller; the content is a number, as the load sends a few
messages again and again. A transaction of which nothing is written was never sent, or was refused (429): where anything
of it stands, the checker finds a message or a half that nobody prepared.
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

Made = tuple[int, bytes]
"""A transaction: the number of its content, and its id."""


class Journal:
    """Writes down the fates of transactions."""

    def __init__(self, file: IO[bytes]) -> None:
        """Take a file that is buffered."""
        self._write = file.write

    def committed(self, made: Iterable[Made]) -> None:
        """Note transactions whose commit was confirmed."""
        for one in made:
            self._write(b"+%d %b\n" % one)

    def unconfirmed(self, made: Iterable[Made]) -> None:
        """Note transactions that were prepared, and whose commit may have been sent and was not confirmed."""
        for one in made:
            self._write(b"?%d %b\n" % one)

    def unanswered(self, contents: Iterable[int], *, brought: bytes = b"") -> None:
        """Note prepares that may be stored or not; `brought` is the id where the caller chose it."""
        for content in contents:
            self._write(b"!%d %b\n" % (content, brought))

    def rolled_back(self, ids: Iterable[bytes]) -> None:
        """Note transactions that are about to be rolled back, as nobody knows them or waits for them any more."""
        for one in ids:
            self._write(b"-0 %b\n" % one)


def history(paths: Sequence[Path], topic: str, contents: Sequence[Content]) -> Iterator[AnyEvent]:
    """Return the events that journals stand for, from `run` to `rest`.

    The times are not those of a clock: each transaction has a span of its own, in which each step follows the other.
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
    asked = (contents[int(content)],)
    if mark == ROLLED_BACK:
        yield End(at=at, id=transaction_id, outcome="rollback", by="operator")
        return
    if mark == UNANSWERED:
        yield Prepare(at=at, ref=ref, group=GROUP, contents=asked, id=transaction_id or None)
        yield Prepared(at=at + 1, sent_at=at, ref=ref, status=0)
        return
    yield Prepare(at=at, ref=ref, group=GROUP, contents=asked)
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
