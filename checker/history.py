"""The history of a run: the calls, their answers, and the faults.

One JSON event per line, appended as it happens. A request is written *before* it is sent, and a verdict before it is
returned, so the history contains everything that can have an effect, even without an answer. `at` and `sent_at` are
milliseconds on one monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import msgspec

from checker.content import Contents

Outcome: TypeAlias = Literal["commit", "rollback"]
Said: TypeAlias = Literal["commit", "rollback", "unknown", "nothing"]


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event", tag=str.lower):
    """Something that happened."""

    at: int = 0


class Run(Event, frozen=True, kw_only=True):
    """The run begins: its seed, and the real topics, which only this run writes to."""

    seed: int
    topics: tuple[str, ...]
    policy_rolls_back: tuple[str, ...] = ()
    """Groups whose policy rolls back undecided transactions."""
    fetching: tuple[str, ...] = ()
    """Groups that fetch their checks; the history contains the checks that arrived, not all that were handed out."""
    horizon_s: float | None = None
    """The time after which an outcome may be forgotten; None if the run is shorter."""
    wall: int | None = None
    """Milliseconds since the epoch at `at`; op markers contain such times."""
    shards: int | None = None
    """If it is given, the shard of an id is known although no record of it is left."""


class Prepare(Event, frozen=True, kw_only=True):
    """A prepare is about to be sent; `ref` identifies this content, `id` is the client's own id."""

    ref: str
    group: str
    contents: Contents
    id: str | None = None


class Prepared(Event, frozen=True, kw_only=True):
    """The answer to a prepare; status 0 if none came."""

    ref: str
    status: int
    sent_at: int = 0
    id: str | None = None
    state: str | None = None
    error_code: str | None = None


class End(Event, frozen=True, kw_only=True):
    """An end is about to be sent, by its producer, an operator or a fetched check."""

    id: str
    outcome: Said
    by: str = "producer"


class Ended(Event, frozen=True, kw_only=True):
    """The answer to an end; status 0 if none came."""

    id: str
    outcome: Said
    status: int
    by: str = "producer"
    sent_at: int = 0
    state: str | None = None
    changed: bool | None = None
    error_code: str | None = None


class Checked(Event, frozen=True, kw_only=True):
    """A check endpoint is about to answer: `said` is the verdict, "nothing" if the answer is not a verdict.

    `manner` is how it answers: plainly, late, or what is wrong with the answer.
    """

    id: str
    said: Said
    manner: str = "plain"


class Taken(Event, frozen=True, kw_only=True):
    """halfway has read the answer to a check: it has used the same connection again."""

    id: str
    said: Said


class Looked(Event, frozen=True, kw_only=True):
    """The answer to a look-up of a transaction (GET, or one entry of a list)."""

    id: str
    status: int
    sent_at: int = 0
    state: str | None = None
    error_code: str | None = None


class Fault(Event, frozen=True, kw_only=True):
    """A fault that is over; it counts if it took effect."""

    kind: str
    target: str
    counts: bool = True
    since: int | None = None
    """When it began, on the same clock as `at`."""
    stops_ms: int | None = None
    """For how long after `since` it explains that shards are not served; None: as long as it lasts."""
    detail: dict[str, Any] = {}


class Removed(Event, frozen=True, kw_only=True):
    """A real topic was deleted with its records."""

    topic: str


class LogLost(Event, frozen=True, kw_only=True):
    """An internal topic lost records: all, as it was deleted and created again, or its end; it is there at `at`."""

    kind: str
    """Its name without the prefix."""
    since: int
    """When it still had them, on the same clock as `at`."""
    ends: dict[int, int] = {}
    """The new end of each partition, if that is what it lost: the next life of the topic begins there."""


class LostInMemory(Event, frozen=True, kw_only=True):
    """Shards whose owners changed by themselves while they alone had what Kafka had lost (docs/verification.md)."""

    shards: tuple[int, ...]
    since: int
    """When Kafka lost it, on the same clock as `at`; it would have been written again by `at`."""
    ends: dict[str, dict[int, int]] = {}
    """If the topics have lost their ends only: the new ends of their partitions, by kind."""


class Serving(Event, frozen=True, kw_only=True):
    """A shard is served from now on, or is not, according to the answers of its callers."""

    shard: int
    serving: bool
    why: str = ""
    """The answer that shows it."""


class Held(Event, frozen=True, kw_only=True):
    """When everything had come to rest, read_committed consumers could not read a partition to its end."""

    topic: str
    partition: int
    end: int
    why: str = ""
    """The reason, as far as it is known."""


class Rest(Event, frozen=True, kw_only=True):
    """The run is over: every part runs, every caller is done, and there was time to resolve everything."""


AnyEvent: TypeAlias = (
    Run
    | Prepare
    | Prepared
    | End
    | Ended
    | Checked
    | Taken
    | Looked
    | Fault
    | Removed
    | LogLost
    | LostInMemory
    | Serving
    | Held
    | Rest
)

_DECODER = msgspec.json.Decoder(AnyEvent)


class HistoryWriter:
    """Appends events to a file; an event is in the file when `write` returns."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the file, which must not exist."""
        self._file = path.open("xb", buffering=0)
        self._encode = msgspec.json.Encoder().encode
        self._clock = clock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def now(self) -> int:
        """Return the current time for `sent_at`."""
        return int(self._clock() * 1000)

    def write(self, event: AnyEvent) -> None:
        """Append an event with the current time."""
        self._file.write(self._encode(msgspec.structs.replace(event, at=self.now())) + b"\n")


def read_history(path: Path) -> Iterator[AnyEvent]:
    """Yield the events of a file in order; msgspec.DecodeError with the line number if a line is not an event."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield _DECODER.decode(line)
            except msgspec.DecodeError as error:
                raise msgspec.DecodeError(f"{path}:{number}: {error}") from error
