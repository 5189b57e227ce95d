"""One log line for events that come thousands of times a minute, and the time since one, also across a suspension."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal
from weakref import WeakSet

EVERY_S: Final = 60.0
MAX_KINDS: Final = 200
"""Kinds that are told apart; further ones are one kind without values, so that no caller can fill the memory."""

Level = Literal["info", "warning"]

_all: WeakSet[LogSummary] = WeakSet()


class _Kind:
    """What has come of one kind since it was logged last."""

    __slots__ = ("count", "fields", "sample")

    def __init__(self, fields: Mapping[str, object]) -> None:
        self.fields = fields
        self.count = 0
        self.sample: Mapping[str, object] = {}


class LogSummary:
    """Logs an event for each of its kinds: at once if the kind is new, then once a minute how many more there were.

    The line of a minute has the fields of the last one as a sample. A kind is its fields that say what happened and to
    whom, such as a group and an error; its values are strings or numbers. Any thread may call.
    """

    def __init__(self, log: Any, level: Level, event: str, *, every_s: float = EVERY_S) -> None:
        """Take the logger, the level and the name of the event."""
        self._log = log
        self._level = level
        self._event = event
        self._every_s = every_s
        self._lock = threading.Lock()
        self._kinds: dict[tuple[object, ...], _Kind] = {}
        self._timer: threading.Timer | None = None
        _all.add(self)

    def note(self, kind: Mapping[str, object], **sample: object) -> None:
        """Log an event now, or count it for the line of this minute."""
        with self._lock:
            known = self._kinds.get(tuple(kind.values()))
            if known is None and len(self._kinds) >= MAX_KINDS:
                kind = dict.fromkeys(kind)
                known = self._kinds.get(tuple(kind.values()))
            if known is not None:
                known.count += 1
                known.sample = sample
                return
            self._kinds[tuple(kind.values())] = _Kind(kind)
            if self._timer is None:
                self._begin_minute()
        self._write(**kind, **sample)

    def flush(self) -> None:
        """Log what was counted, and begin anew."""
        with self._lock:
            kinds, self._kinds = self._kinds, {}
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        self._write_counted(kinds.values())

    def _begin_minute(self) -> None:
        self._timer = threading.Timer(self._every_s, self._end_minute)
        self._timer.daemon = True
        self._timer.start()

    def _end_minute(self) -> None:
        with self._lock:
            kinds = self._kinds
            # What goes on is not new in the next minute: it is counted from its first.
            self._kinds = {key: _Kind(kind.fields) for key, kind in kinds.items() if kind.count}
            self._timer = None
            if self._kinds:
                self._begin_minute()
        self._write_counted(kinds.values())

    def _write_counted(self, kinds: Iterable[_Kind]) -> None:
        for kind in kinds:
            if kind.count:
                self._write(**kind.fields, **kind.sample, more=kind.count, within_s=self._every_s)

    def _write(self, **fields: object) -> None:
        # The logger's method is looked up each time: one from before the log was configured would print.
        getattr(self._log, self._level)(self._event, **fields)


def flush_all() -> None:
    """Log what every summary of this process has counted, because it stops."""
    for summary in list(_all):
        summary.flush()


@dataclass(frozen=True, kw_only=True, slots=True)
class Instant:
    """A moment on both clocks: the monotonic one stops while a machine is suspended, the other one can be set back."""

    monotonic: float
    wall: float

    @classmethod
    def now(cls) -> Instant:
        return cls(monotonic=time.monotonic(), wall=time.time())

    @property
    def age_s(self) -> float:
        """How long ago it was, at most: a clock that is set forward makes it older."""
        return max(time.monotonic() - self.monotonic, time.time() - self.wall)
