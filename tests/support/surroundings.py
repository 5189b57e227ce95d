"""The environment: a clock that a test sets, a scripted check caller, and an observer that records every call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from halfway.coordinator.ports import CheckReply, CheckRequest
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


class RecordingObserver:
    """The port `service.ports.Observer`: records every call."""

    def __init__(self) -> None:
        self.calls: list[Observed] = []

    def count(self, event: str, **fields: object) -> int:
        """Count the calls of an event that have all these fields."""
        return sum(call.event == event and fields.items() <= call.fields.items() for call in self.calls)

    def _record(self, event: str, **fields: object) -> None:
        self.calls.append(Observed(event, fields))

    def _record_each(self, event: str, groups: Mapping[str, int], **fields: object) -> None:
        for group, count in groups.items():
            for _ in range(count):
                self._record(event, group=group, **fields)

    def prepared(self, groups: Mapping[str, int], result: str, seconds: float) -> None:
        self._record_each("prepared", groups, result=result, seconds=seconds)

    def ended(self, groups: Mapping[str, int], outcome: str, cause: str, result: str, seconds: float) -> None:
        self._record_each("ended", groups, outcome=outcome, cause=cause, result=result, seconds=seconds)

    def resolved_after(self, groups: Mapping[str, int], outcome: str, seconds: float) -> None:
        self._record_each("resolved_after", groups, outcome=outcome, seconds=seconds)

    def checked(self, group: str, verdict: str, sent: bool, seconds: float) -> None:
        self._record("checked", group=group, verdict=verdict, sent=sent, seconds=seconds)

    def lane_committed(self, ends: int, payload_bytes: int, seconds: float) -> None:
        self._record("lane_committed", ends=ends, payload_bytes=payload_bytes, seconds=seconds)

    def lane_failed(self, reason: str) -> None:
        self._record("lane_failed", reason=reason)

    def skipped_record(self, topic: str, reason: str) -> None:
        self._record("skipped_record", topic=topic, reason=reason)

    def forwarded(self, call: str, result: str, seconds: float) -> None:
        self._record("forwarded", call=call, result=result, seconds=seconds)

    def refused_caller(self, reason: str) -> None:
        self._record("refused_caller", reason=reason)

    def shard_moved(self, seconds: float) -> None:
        """Record how long a shard was unserved."""
        self._record("shard_moved", seconds=seconds)

    def audited(self, result: str) -> None:
        self._record("audited", result=result)

    def horizon_shortened(self, shard: int, outcomes: int) -> None:
        """Record outcomes that were forgotten before their time."""
        self._record("horizon_shortened", shard=shard, outcomes=outcomes)
