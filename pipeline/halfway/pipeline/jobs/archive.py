"""The job `archive`: writes the topics as they are now to Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfway.pipeline.jobs import reading
from halfway.pipeline.sources import headers, spark

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfway.pipeline.engines.engine import Engine
    from halfway.pipeline.sources.pinned import Source
    from halfway.pipeline.sources.pins import Pins
    from halfway.pipeline.tables.folders import Folder


def run(engine: Engine, source: Source, output: Folder, topics: Sequence[str]) -> Pins:
    """Archive halfway's own topics, the real ones that outcomes and groups name, and those given; return the offsets.

    The ends of op are pinned before those of the others, as in an audit, so that the archive can be audited.
    """
    op, *others = (source.prefix + kind for kind in ("op", "half", "parked", "groups", "owners", "audit"))
    source.pin([op])
    reading.require(source, ["op"])
    source.pin(others)
    outcomes = reading.decoded_outcomes(engine, headers.internal(engine, source.committed([op]), "'op'"))
    real = reading.real_topics(engine, outcomes, reading.groups(engine, source), source.prefix, topics)
    source.pin(real)
    reading.require_given(source, topics)
    source.extend_unsettled(op)
    return spark.archive(source, [op, *others, *real], output)
