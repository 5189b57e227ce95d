"""`python -m bench.pipeline.continued ENGINE ARCHIVE PINS OUTPUT MEMORY`: a run of `audit --continue` over an archive.

An archive does not grow, and `--continue` reads Kafka. Here the archive is read up to the offsets in a file, like a
topic that ended there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from halfway.pipeline.commands import engine_choice
from halfway.pipeline.commands.running import running, source_of
from halfway.pipeline.engines.engine import union
from halfway.pipeline.jobs import audit, incremental
from halfway.pipeline.sources.pins import Pins

if TYPE_CHECKING:
    from halfway.pipeline.engines.engine import Engine, Frame
    from halfway.pipeline.sources.pinned import Source

_NOTHING: Final = Pins(at=0, topics={})


class Growing:
    """A source: an archive as it was when its topics ended at given offsets."""

    def __init__(self, engine: Engine, whole: Source, now: Pins) -> None:
        self._engine = engine
        self._whole = whole
        self._now = now
        self._before = _NOTHING
        self.pins = Pins(at=now.at, topics={})

    @property
    def prefix(self) -> str:
        """The prefix of the names of halfway's own topics."""
        return self._whole.prefix

    def pin(self, topics: Sequence[str]) -> None:
        """Pin the topics that exist, from the end of the previous run on."""
        found = {
            name: self._before.followed_by(self._now.topics[name])
            for name in topics
            if name in self._now.topics and name not in self.pins.topics
        }
        self.pins = replace(self.pins, topics={**self.pins.topics, **found})

    def extend_unsettled(self, topic: str) -> None:
        """Change nothing."""

    def reopened(self) -> Growing:
        """Return the same with nothing pinned."""
        return Growing(self._engine, self._whole, self._now)

    def continue_from(self, pins: Pins) -> None:
        """Begin where earlier pins end."""
        self._before = pins

    def cover(self, pins: Pins) -> None:
        """Read what earlier pins and those before them cover."""
        self.pins = pins.again(self._now)

    def committed(self, topics: Sequence[str]) -> Frame:
        """Return the records between the offsets."""
        pinned = [(name, self.pins.topics[name].partitions[0]) for name in topics if name in self.pins.topics]
        parts = [
            self._engine.query(
                f'select * from $whole where "offset" >= {pin.start} and "offset" < {pin.end}',  # noqa: S608
                whole=self._whole.committed([name]),
            )
            for name, pin in pinned
        ]
        return union(self._engine, parts) if parts else self._whole.committed([])

    def unsettled(self, topics: Sequence[str]) -> Frame:
        """Return nothing: in these archives everything is settled."""
        return self._whole.unsettled(topics)

    def later(self, topics: Sequence[str], now: Pins) -> Frame:
        """Return nothing."""
        return self._whole.later(topics, now)


@contextmanager
def _opened(engine: str, places: engine_choice.Places, memory: str) -> Iterator[engine_choice.Parts]:
    if engine == "duckdb":
        with engine_choice.on_duckdb(places, memory=memory or None) as parts:
            yield parts
        return
    with running("audit", kafka=False, master=None, memory=memory, conf=(), connector_version=None, jars="") as spark:
        from halfway.pipeline.engines.engine import SparkEngine
        from halfway.pipeline.tables.folders import Folder

        made = SparkEngine(spark)
        source = source_of(spark, None, places.snapshot, None)
        yield engine_choice.Parts(engine=made, source=source, output=Folder(spark, places.output))
        made.close()


def main(engine: str, archive: str, pins: str, output: str, memory: str) -> None:
    """Print the verdicts of all runs over these offsets and those before, as `--json` does."""
    now = Pins.from_json(Path(archive, pins).read_text(encoding="utf-8"))
    with _opened(
        engine, engine_choice.Places(output=output, snapshot=archive, offsets=None, access=None), memory
    ) as parts:
        source = Growing(parts.engine, parts.source, now)
        summary = incremental.run(parts.engine, source, parts.output, audit.AuditOptions())
    print(json.dumps({**summary.verdicts, "quarantined": summary.quarantined}))


if __name__ == "__main__":
    main(*sys.argv[1:])
