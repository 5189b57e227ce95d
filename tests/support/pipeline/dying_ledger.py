"""`halfway-pipeline ledger` that dies at a moment of a batch, its second where nothing else is said.

Run as a program, it is killed from within without warning, with Spark's JVM; it must lead a process group of its own.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import deltalake

from halfway.pipeline import cli
from halfway.pipeline.jobs.ledger import QUARANTINE, Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Moment = Literal["half written", "first table written", "quarantine begun", "all written"]
UNFINISHED = "part-00000-unfinished.parquet"
"""A file of a table that was begun to be written."""


def kill() -> None:
    os.killpg(0, signal.SIGKILL)


@contextmanager
def dying(moment: Moment, die: Callable[[], None], *, batch_of_run: int = 2) -> Iterator[None]:
    """Kill a ledger of this process."""
    batches: list[int] = []
    write, add, write_deltalake = Tables.write, Tables._add, deltalake.write_deltalake

    def dying_write(self: Tables, batch: "DataFrame", number: int) -> None:
        batches.append(number)
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

    def dying_deltalake(table: deltalake.DeltaTable, *given: Any, **options: Any) -> None:
        if len(batches) == batch_of_run and moment == "half written":
            Path(table.table_uri.removeprefix("file://"), UNFINISHED).write_bytes(b"PAR1")
            die()
        write_deltalake(table, *given, **options)

    # Methods are put in place of methods, which mypy cannot know to be meant.
    Tables.write, Tables._add = dying_write, dying_add  # type: ignore[method-assign]
    deltalake.write_deltalake = dying_deltalake  # type: ignore[assignment]
    try:
        yield
    finally:
        Tables.write, Tables._add = write, add  # type: ignore[method-assign]
        deltalake.write_deltalake = write_deltalake


def main(moment: Moment, *arguments: str) -> None:
    sys.argv = ["halfway-pipeline", *arguments]
    with dying(moment, kill):
        cli.main()


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]  # it is given one of the moments
