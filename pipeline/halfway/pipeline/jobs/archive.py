"""The job `archive`: writes the topics as they are now to Parquet, to be audited after Kafka has removed them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from pyspark.sql import functions as F

from halfway.pipeline.engines.engine import Engine
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.jobs import reading
from halfway.pipeline.sources import headers
from halfway.pipeline.sources.pinned import ABOUT, COMMITTED, LATER, PINS, UNSETTLED, Source
from halfway.pipeline.sources.pins import Pins, TopicPin
from halfway.pipeline.tables import Files


def run(engine: Engine, source: Source, output: Files, topics: Sequence[str]) -> Pins:
    """Archive halfway's own topics, the real ones that outcomes and groups name, and those given; return the offsets.

    The ends of op are pinned before those of the others, as in an audit, so that the archive can be audited. There is
    one folder for each topic. The offsets are written last: a folder without them is not a finished archive.
    """
    if PINS in output.names():
        raise PipelineError(f"{output.uri!r} holds an archive already: choose another folder")
    op, *others = (source.prefix + kind for kind in ("op", "half", "parked", "groups", "owners", "audit"))
    source.pin([op])
    reading.require(source, ["op"])
    source.pin(others)
    outcomes = reading.decoded_outcomes(engine, source.committed([op], headers.internal(engine.dialect, "'op'")))
    real = reading.real_topics(engine, outcomes, reading.groups(engine, source), source.prefix, topics)
    source.pin(real)
    reading.require_given(source, topics)
    source.extend_unsettled(op)
    archived = [op, *others, *real]
    for part, records in ((COMMITTED, source.committed), (UNSETTLED, source.unsettled)):
        records(archived).write.mode("overwrite").partitionBy("topic").parquet(output.path(part))
    now = source.reopened()
    now.pin(archived)
    # A topic that was deleted in the meantime is left out: it proves nothing.
    kept = {name: _trimmed(source.pins.topics[name], pin) for name, pin in now.pins.topics.items() if name in archived}
    pins = replace(source.pins, topics=kept)
    # A later record of the key is the only trace of a record that compaction removes.
    compacted = [name for name, pin in kept.items() if pin.compacted]
    without_values = source.later(compacted, now.pins).withColumn("value", F.lit(None).cast("binary"))
    without_values.write.mode("overwrite").partitionBy("topic").parquet(output.path(LATER))
    output.write(json.dumps({"prefix": source.prefix}) + "\n", ABOUT)
    output.write(pins.to_json(), PINS)
    return pins


def _trimmed(pin: TopicPin, now: TopicPin) -> TopicPin:
    """Return a pin without the records that have been removed until now."""
    later = {each.partition: each for each in now.partitions}
    partitions = tuple(
        replace(each, start=max(each.start, later[each.partition].start), first_at=later[each.partition].first_at)
        for each in pin.partitions
        if each.partition in later
    )
    return replace(now, partitions=partitions)
