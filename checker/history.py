"""The history of a run: what callers asked, what they were told, and what was done to the system.

One JSON event a line, appended as it happens. What is asked is written *before* it is sent, a verdict before it is
given: whatever can have an effect stands in the history, also where its answer never came. `at` and `sent_at` are
milliseconds on one clock that never goes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias

import msgspec

from checker.content import Contents

Outcome: TypeAlias = Literal["commit", "rollback"]
Said: TypeAlias = Literal["commit", "rollback", "unknown", "nothing"]

LIFE: Final = "#"
"""Stands behind an id that is used again past the horizon, before the number of its use; no id on the wire has it."""


def wire_id(name: str) -> str:
    """Return the id as halfway knows it, of the name that the history gives to one use of it."""
    return name.partition(LIFE)[0]


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event", tag=str.lower):
    """Something that happened."""

    at: int = 0


class Run(Event, frozen=True, kw_only=True):
    """The run begins: its seed, and the real topics, which nobody else writes to."""

    seed: int
    topics: tuple[str, ...]
    policy_rolls_back: tuple[str, ...] = ()
    """Groups whose policy rolls back what nobody decides."""
    fetching: tuple[str, ...] = ()
    """Groups that fetch their checks: the history has those that arrived, not all that were handed out."""
    horizon_s: float | None = None
    """After so long an outcome may be forgotten, and its id used again; None if the run is shorter."""
    wall: int | None = None
    """Milliseconds since the epoch at `at`: op markers carry the time of day."""


class Prepare(Event, frozen=True, kw_only=True):
    """A prepare is about to be sent; `ref` names this content, `id` is the one that the client brings."""

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
    """A check endpoint is about to answer: `said` is the verdict, "nothing" if the answer is none.

    `manner` says how: plainly, late, or what is wrong with the answer.
    """

    id: str
    said: Said
    manner: str = "plain"


class Taken(Event, frozen=True, kw_only=True):
    """The asker has read the answer to a check: it has used the same connection again."""

    id: str
    said: Said


class Looked(Event, frozen=True, kw_only=True):
    """The answer to a question for a transaction (GET, or one line of a list)."""

    id: str
    status: int
    sent_at: int = 0
    state: str | None = None
    error_code: str | None = None


class Fault(Event, frozen=True, kw_only=True):
    """Something was done to the system, and is over; it counts if it took effect."""

    kind: str
    target: str
    counts: bool = True
    since: int | None = None
    """When it began, on the same clock as `at`."""
    stops_ms: int | None = None
    """For how long from then on it explains that shards are not served; None: for as long as it lasts."""
    detail: dict[str, Any] = {}


class Removed(Event, frozen=True, kw_only=True):
    """A real topic has been deleted, with what stood in it."""

    topic: str


class Serving(Event, frozen=True, kw_only=True):
    """A shard is served from now on, or is not, by what its callers are told."""

    shard: int
    serving: bool
    why: str = ""
    """What they were told."""


class Held(Event, frozen=True, kw_only=True):
    """A partition could not be read to its end by consumers of committed records, when all had come to rest."""

    topic: str
    partition: int
    end: int
    why: str = ""
    """What is known of the reason."""


class Rest(Event, frozen=True, kw_only=True):
    """The run is over: every part runs, every caller is done, and there was time for everything to be resolved."""


AnyEvent: TypeAlias = (
    Run | Prepare | Prepared | End | Ended | Checked | Taken | Looked | Fault | Removed | Serving | Held | Rest
)

_DECODER = msgspec.json.Decoder(AnyEvent)


class HistoryWriter:
    """Appends events to a file; each stands in it when `write` returns."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Open the file, which must not hold another history."""
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
        """Return the time that goes into `sent_at`."""
        return int(self._clock() * 1000)

    def write(self, event: AnyEvent) -> None:
        """Append an event with the present time."""
        self._file.write(self._encode(msgspec.structs.replace(event, at=self.now())) + b"\n")


def read_history(path: Path) -> Iterator[AnyEvent]:
    """Return the events of a file in their order; msgspec.DecodeError with the line's number where one is none."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield _DECODER.decode(line)
            except msgspec.DecodeError as error:
                raise msgspec.DecodeError(f"{path}:{number}: {error}") from error
