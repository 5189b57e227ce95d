"""The environment: a clock that a test sets, a scripted check caller, and an observer that records every call."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from halfway.coordinator.ports import CheckReply, CheckRequest, Observer
from halfway.protocol.records import AuditEvent, Group
from halfway.protocol.transactions import Outcome

Answer = Callable[[CheckRequest], CheckReply | Awaitable[CheckReply]]


class ManualClock:
    """The port `service.ports.Clock`: a test moves it."""

    def __init__(self, now_ms: int = 1_760_000_000_000) -> None:
        """Start at a time in ms since the epoch."""
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def advance(self, seconds: float) -> None:
        """Move the clock forward; a negative number moves it back."""
        self._now_ms += round(seconds * 1000)

    def set(self, now_ms: int) -> None:
        """Set the clock to a time in ms since the epoch."""
        self._now_ms = now_ms


def verdict(outcome: Outcome, *, remark: str | None = None) -> CheckReply:
    return CheckReply(outcome=outcome, sent=True, answered=True, reachable=True, detail="200", remark=remark)


def no_verdict(detail: str = "500") -> CheckReply:
    """Return the reply of an endpoint that was reached and gave no verdict."""
    return CheckReply(outcome=Outcome.UNKNOWN, sent=True, answered=False, reachable=True, detail=detail)


def unreachable(detail: str = "connection refused") -> CheckReply:
    """Return the reply for an endpoint that could not be reached."""
    return CheckReply(outcome=Outcome.UNKNOWN, sent=False, answered=False, reachable=False, detail=detail)


class ScriptedCaller:
    """The port `service.check_ports.CheckCaller`: a test sets `answer`, and every request is recorded."""

    def __init__(self, answer: Answer | None = None) -> None:
        """Answer `unknown` unless `answer` is given or set later."""
        self.answer: Answer = answer or (lambda _: verdict(Outcome.UNKNOWN))
        self.requests: list[CheckRequest] = []
        self.refused: dict[str, str] = {}
        """Endpoints that the operator does not allow, and why."""
        self.urls: list[tuple[str, ...]] = []
        """The endpoints of each request, in the order in which they were to be tried."""

    def refusal(self, url: str) -> str | None:
        """Allow every endpoint that is not in `refused`."""
        return self.refused.get(url)

    def always(self, reply: CheckReply) -> None:
        self.answer = lambda _: reply

    async def call(self, group: Group, urls: Sequence[str], request: CheckRequest) -> CheckReply:
        """Record the request and reply with `answer`, in a later turn of the loop."""
        del group
        self.requests.append(request)
        self.urls.append(tuple(urls))
        await asyncio.sleep(0)
        reply = self.answer(request)
        return reply if isinstance(reply, CheckReply) else await reply


class MemoryAuditTrail:
    """The port `service.ports.AuditTrail`: records every event."""

    def __init__(self) -> None:
        self.events: list[AuditEvent] = []

    def record(self, event: AuditEvent) -> bool:
        self.events.append(event)
        return True


class Observed(msgspec.Struct, frozen=True):
    """One call of the observer: its name and arguments."""

    event: str
    fields: dict[str, Any]


def _recording(event: str) -> Callable[..., None]:
    names = [*inspect.signature(getattr(Observer, event)).parameters][1:]

    def record(self: RecordingObserver, *values: object, **named: object) -> None:
        fields: dict[str, Any] = dict(zip(names, values, strict=False)) | named
        if (groups := fields.pop("groups", None)) is None:
            self.calls.append(Observed(event, fields))
        else:
            for group, count in groups.items():
                self.calls += [Observed(event, {"group": group, **fields})] * count

    return record


class RecordingObserver:
    """The port `Observer`: records every call, and one for each transaction where a call is about those of groups."""

    def __init__(self) -> None:
        self.calls: list[Observed] = []

    def count(self, event: str, **fields: object) -> int:
        """Count the calls of an event that have all these fields."""
        return sum(call.event == event and fields.items() <= call.fields.items() for call in self.calls)

    def told(self, event: str, field: str) -> list[Any]:
        """Return one field of each call of an event."""
        return [call.fields[field] for call in self.calls if call.event == event]

    prepared = _recording("prepared")
    ended = _recording("ended")
    resolved_after = _recording("resolved_after")
    checked = _recording("checked")
    lane_committed = _recording("lane_committed")
    lane_failed = _recording("lane_failed")
    skipped_record = _recording("skipped_record")
    forwarded = _recording("forwarded")
    refused_caller = _recording("refused_caller")
    shard_moved = _recording("shard_moved")
    audited = _recording("audited")
    horizon_shortened = _recording("horizon_shortened")
