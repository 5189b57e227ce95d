"""`halfway-pipeline ledger` that dies at a moment of a batch, its second where nothing else is said.

Run as a program, it is killed from within without warning, with Spark's JVM; it must lead a process group of its own.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from halfway.pipeline import cli
from halfway.pipeline.jobs.ledger import QUARANTINE, Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from halfway.pipeline.engines.engine import SparkEngine

Moment = Literal["half written", "first table written", "quarantine begun", "all written"]
UNFINISHED = "part-00000-unfinished.parquet"
"""A file of a table that was begun to be written."""


def kill() -> None:
    os.killpg(0, signal.SIGKILL)


@contextmanager
def dying(moment: Moment, die: Callable[[], None], *, batch_of_run: int = 2) -> Iterator[None]:
    """Kill a ledger of this process."""
    batches: list[int] = []
    write, save = Tables.write, Tables._save

    def dying_write(self: Tables, batch: "DataFrame", number: int) -> None:
        batches.append(number)
        write(self, batch, number)
        if len(batches) == batch_of_run:
            # Spark notes a batch as done when this has returned.
            die()

    def dying_save(
        self: Tables, engine: "SparkEngine", name: str, rows: "DataFrame", number: int, *, by: str | None = None
    ) -> None:
        now = len(batches) == batch_of_run
        if now and moment == "quarantine begun" and name == QUARANTINE:
            die()
        if now and moment == "half written":
            table = Path(self._output.path(name).removeprefix("file://"))
            table.mkdir(parents=True, exist_ok=True)
            (table / UNFINISHED).write_bytes(b"PAR1")
            die()
        save(self, engine, name, rows, number, by=by)
        if now and moment == "first table written":
            die()

    # Methods are put in place of methods, which mypy cannot know to be meant.
    Tables.write, Tables._save = dying_write, dying_save  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tables.write, Tables._save = write, save  # type: ignore[method-assign]


def main(moment: Moment, *arguments: str) -> None:
    sys.argv = ["halfway-pipeline", *arguments]
    with dying(moment, kill):
        cli.main()


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]  # it is given one of the moments
