"""`halfway-pipeline ledger`, killed from within at a moment of its second batch, with Spark's JVM and without warning.

The process must lead a group of its own: all of the group is killed.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from halfway.pipeline import cli
from halfway.pipeline.jobs.ledger import ENDED, Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MOMENTS = ("begun", "half written", "first table written", "all written")
_BATCH = 2
_LOOK_S = 0.0005


def die() -> None:
    os.killpg(0, signal.SIGKILL)


def die_at(moment: str) -> None:
    """Arrange for it."""
    batches: list[int] = []
    write, add = Tables.write, Tables._add

    def dying_write(self: Tables, batch: "DataFrame", number: int) -> None:
        batches.append(number)
        if len(batches) == _BATCH and moment == "begun":
            die()
        if len(batches) == _BATCH and moment == "half written":
            unfinished = Path(self._output.path(ENDED, f"batch={number}", "_temporary"))
            threading.Thread(target=_die_when_there, args=[unfinished], daemon=True).start()
        write(self, batch, number)
        if len(batches) == _BATCH:
            # Spark notes a batch as done when this has returned.
            die()

    def dying_add(self: Tables, table: "DataFrame", name: str, number: int) -> None:
        add(self, table, name, number)
        if len(batches) == _BATCH and moment == "first table written":
            die()

    # Methods are put in place of methods, which mypy cannot know to be meant.
    Tables.write = dying_write  # type: ignore[method-assign]
    Tables._add = dying_add  # type: ignore[method-assign]


def _die_when_there(path: Path) -> None:
    while not path.exists():
        time.sleep(_LOOK_S)
    die()


if __name__ == "__main__":
    moment, *arguments = sys.argv[1:]
    die_at(moment)
    sys.argv = ["halfway-pipeline", *arguments]
    cli.main()
