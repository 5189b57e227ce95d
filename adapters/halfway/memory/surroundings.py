"""The rest of the world: a clock that a test sets, a caller that it scripts, an observer that keeps every call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from halfway.domain.audit_trail import AuditEvent
from halfway.domain.records import Group
from halfway.domain.transaction import Outcome
from halfway.service.check_ports import CheckReply, CheckRequest

Answer = Callable[[CheckRequest], CheckReply | Awaitable[CheckReply]]


class ManualClock:
    """The port `service.ports.Clock`: it stands still until a test moves it."""

    def __init__(self, now_ms: int = 1_760_000_000_000) -> None:
        """Start at a time in ms since the epoch."""
        self._now_ms = now_ms

    def now_ms(self) -> int:
        """Return ms since the epoch."""
        return self._now_ms

    def advance(self, seconds: float) -> None:
        """Move on; a negative number steps back."""
        self._now_ms += round(seconds * 1000)

    def set(self, now_ms: int) -> None:
        """Jump to a time in ms since the epoch."""
        self._now_ms = now_ms


def verdict(outcome: Outcome, *, remark: str | None = None) -> CheckReply:
    """Make the reply of an endpoint that answered."""
    return CheckReply(outcome=outcome, sent=True, answered=True, reachable=True, detail="200", remark=remark)


def no_verdict(detail: str = "500") -> CheckReply:
    """Make the reply of an endpoint that was reached and gave no verdict."""
    return CheckReply(outcome=Outcome.UNKNOWN, sent=True, answered=False, reachable=True, detail=detail)


def unreachable(detail: str = "connection refused") -> CheckReply:
    """Make the reply for an endpoint to which nothing could be sent."""
    return CheckReply(outcome=Outcome.UNKNOWN, sent=False, answered=False, reachable=False, detail=detail)


class ScriptedCaller:
    """The port `service.check_ports.CheckCaller`: a test sets `answer`; every request is kept."""

    def __init__(self, answer: Answer | None = None) -> None:
        """Answer unknown until told otherwise."""
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
        """Give one reply to every request from now on."""
        self.answer = lambda _: reply

    async def call(self, group: Group, urls: Sequence[str], request: CheckRequest) -> CheckReply:
        """Keep the request and reply as the test says, at a later turn of the loop."""
        del group
        self.requests.append(request)
        self.urls.append(tuple(urls))
        await asyncio.sleep(0)
        reply = self.answer(request)
        return reply if isinstance(reply, CheckReply) else await reply


class MemoryAuditTrail:
    """The port `service.ports.AuditTrail`: keeps every event."""

    def __init__(self) -> None:
        """Start with none."""
        self.events: list[AuditEvent] = []

    def record(self, event: AuditEvent) -> None:
        """Keep an event."""
        self.events.append(event)


class Observed(msgspec.Struct, frozen=True):
    """One call of the observer: which, and with what."""

    event: str
    fields: dict[str, Any]


class RecordingObserver:
    """The port `service.ports.Observer`: keeps every call."""

    def __init__(self) -> None:
        """Start with none."""
        self.calls: list[Observed] = []

    def count(self, event: str, **fields: object) -> int:
        """Count the calls of an event that have all these fields."""
        return sum(call.event == event and fields.items() <= call.fields.items() for call in self.calls)

    def _keep(self, event: str, **fields: object) -> None:
        self.calls.append(Observed(event, fields))

    def _keep_each(self, event: str, groups: Mapping[str, int], **fields: object) -> None:
        for group, count in groups.items():
            for _ in range(count):
                self._keep(event, group=group, **fields)

    def prepared(self, groups: Mapping[str, int], result: str, seconds: float) -> None:
        """Keep each prepare."""
        self._keep_each("prepared", groups, result=result, seconds=seconds)

    def ended(self, groups: Mapping[str, int], outcome: str, cause: str, result: str, seconds: float) -> None:
        """Keep each end."""
        self._keep_each("ended", groups, outcome=outcome, cause=cause, result=result, seconds=seconds)

    def resolved_after(self, groups: Mapping[str, int], outcome: str, seconds: float) -> None:
        """Keep each time from prepare to outcome."""
        self._keep_each("resolved_after", groups, outcome=outcome, seconds=seconds)

    def checked(self, group: str, verdict: str, sent: bool, seconds: float) -> None:  # noqa: FBT001 - the port's
        """Keep a check."""
        self._keep("checked", group=group, verdict=verdict, sent=sent, seconds=seconds)

    def lane_committed(self, ends: int, payload_bytes: int, seconds: float) -> None:
        """Keep a Kafka transaction of the lane."""
        self._keep("lane_committed", ends=ends, payload_bytes=payload_bytes, seconds=seconds)

    def lane_failed(self, reason: str) -> None:
        """Keep the end of an incarnation."""
        self._keep("lane_failed", reason=reason)

    def skipped_record(self, topic: str, reason: str) -> None:
        """Keep a record that could not be used."""
        self._keep("skipped_record", topic=topic, reason=reason)

    def forwarded(self, call: str, result: str, seconds: float) -> None:
        """Keep a call to another instance."""
        self._keep("forwarded", call=call, result=result, seconds=seconds)

    def refused_caller(self, reason: str) -> None:
        """Keep the refusal of a caller."""
        self._keep("refused_caller", reason=reason)

    def shard_moved(self, seconds: float) -> None:
        """Keep how long a shard was served by nobody."""
        self._keep("shard_moved", seconds=seconds)

    def audited(self, result: str) -> None:
        """Keep the result of an event of the audit trail."""
        self._keep("audited", result=result)

    def horizon_shortened(self, shard: int, outcomes: int) -> None:
        """Keep outcomes that were forgotten before their time."""
        self._keep("horizon_shortened", shard=shard, outcomes=outcomes)
