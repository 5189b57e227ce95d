"""The job `archive`: the topics as they are now, in Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from halfway.pipeline import sources
from halfway.pipeline.jobs import reading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfway.pipeline.folders import Folder
    from halfway.pipeline.pins import Pins


def run(source: sources.Source, output: Folder, topics: Sequence[str]) -> Pins:
    """Archive halfway's own topics, the real topics that its groups name, and those given; return their offsets.

    op's ends are taken before those of the others, as `audit` does, so that an archive can be audited like the topics.
    """
    op, *others = (source.prefix + kind for kind in ("op", "half", "parked", "groups"))
    source.pin([op])
    source.pin(others)
    named = reading.groups(source).select(F.explode("topics").alias("topic")).distinct().collect()
    real = sorted({*topics, *(row["topic"] for row in named)})
    source.pin(real)
    source.settle(op)
    return sources.archive(source, [op, *others, *real], output)
