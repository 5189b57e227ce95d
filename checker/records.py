"""The records of the topics as the judge needs them; `checker.dump` reads them from Kafka."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

from checker.content import Content, Contents


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="record", tag=str.lower):
    """One record; `shard` is the partition, also of a real topic."""

    shard: int
    offset: int
    id: str
    """The transaction's id; empty if the record contains none."""
    life: int = 0
    """How often its topic had been deleted and created again before."""

    @property
    def order(self) -> tuple[int, int]:
        """The order of the records of one partition."""
        return self.life, self.offset

    @property
    def place(self) -> str:
        """The position of the record, for messages."""
        again = f" of life {self.life}" if self.life else ""
        return f"{type(self).__name__.lower()}[{self.shard}]@{self.offset}{again}"


class Real(Record, frozen=True, kw_only=True):
    """A message in a real topic, as a read_committed consumer gets it; number 0 if it has no number."""

    content: Content
    number: int
    total: int

    @property
    def place(self) -> str:
        """The position of the record, for messages."""
        return f"{self.content.topic}[{self.shard}]@{self.offset}"


class Half(Record, frozen=True, kw_only=True):
    """A record of half; `contents` is None for a tombstone."""

    contents: Contents | None = None
    group: str = ""


class Op(Record, frozen=True, kw_only=True):
    """An op marker."""

    kind: str
    cause: str
    group: str = ""
    messages: tuple[tuple[str, str | None, str | None], ...] = ()
    """Topic and the hashes of key and value."""
    half_offset: int = -1
    """The offset of the half that it belongs to."""
    checks: int = 0
    """The checks sent before, as halfway has counted them."""
    at: int = 0
    """When it happened: milliseconds since the epoch, on the clock of its writer."""
    remark: str | None = None
    """Why policy gave up."""

    @property
    def outcome(self) -> str | None:
        """`committed` or `rolled_back` for a final kind, else None."""
        return {"COMMITTED": "committed", "ROLLED_BACK": "rolled_back"}.get(self.kind)


class Parked(Record, frozen=True, kw_only=True):
    """A record of parked."""

    tombstone: bool = False
    contents: Contents | None = None


AnyRecord: TypeAlias = Real | Half | Op | Parked

_DECODER = msgspec.json.Decoder(AnyRecord)


def write_records(path: Path, records: Iterable[AnyRecord]) -> None:
    """Write one JSON record per line."""
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        file.writelines(encode(record) + b"\n" for record in records)


def read_records(path: Path) -> Iterator[AnyRecord]:
    """Yield the records of a file; msgspec.DecodeError with the line number if a line is not a record."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield _DECODER.decode(line)
            except msgspec.DecodeError as error:
                raise msgspec.DecodeError(f"{path}:{number}: {error}") from error
