"""`halfway-pipeline ledger` that dies at a moment of a batch, its second where nothing else is said.

Run as a program, it is killed from within without warning, with Spark's JVM; it must lead a process group of its own.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from halfway.pipeline import cli
from halfway.pipeline.jobs.ledger import PENDING, QUARANTINE, Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Moment = Literal["half written", "first table written", "quarantine begun", "all written"]
_LOOK_S = 0.0005


def kill() -> None:
    os.killpg(0, signal.SIGKILL)


@contextmanager
def dying(moment: Moment, die: Callable[[], None], *, batch_of_run: int = 2) -> Iterator[None]:
    """Let a ledger of this process die; what is half written can only be left behind by a kill."""
    batches: list[int] = []
    write, add = Tables.write, Tables._add

    def dying_write(self: Tables, batch: "DataFrame", number: int) -> None:
        batches.append(number)
        if len(batches) == batch_of_run and moment == "half written":
            unfinished = Path(self._output.path(PENDING, f"batch={number}", "_temporary"))
            threading.Thread(target=_die_when_there, args=[unfinished, die], daemon=True).start()
        write(self, batch, number)
        if len(batches) == batch_of_run:
            # Spark notes a batch as done when this has returned.
            die()

    def dying_add(self: Tables, table: "DataFrame", name: str, number: int) -> int:
        if len(batches) == batch_of_run and moment == "quarantine begun" and name == QUARANTINE:
            die()
        rows = add(self, table, name, number)
        if len(batches) == batch_of_run and moment == "first table written":
            die()
        return rows

    # Methods are put in place of methods, which mypy cannot know to be meant.
    Tables.write, Tables._add = dying_write, dying_add  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tables.write, Tables._add = write, add  # type: ignore[method-assign]


def _die_when_there(path: Path, die: Callable[[], None]) -> None:
    while not path.exists():
        time.sleep(_LOOK_S)
    die()


def main(moment: Moment, *arguments: str) -> None:
    sys.argv = ["halfway-pipeline", *arguments]
    with dying(moment, kill):
        cli.main()


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]  # it is given one of the moments
