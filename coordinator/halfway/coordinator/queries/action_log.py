"""The actions of callers with their results, in the log and through the port `AuditTrail`.

Events of transactions that are in no record are kept as this instance saw them, in bounded memory
(docs/rest.md#history).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from secrets import token_hex
from sys import getsizeof, intern
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import structlog
from yarl import URL

from halfway.coordinator.logging import LogSummary
from halfway.coordinator.records import HistoryEvent
from halfway.coordinator.requests import EndResult, Moment
from halfway.protocol.errors import ForbiddenError, HalfwayError, UnauthenticatedError
from halfway.protocol.records import Audited, AuditEvent

if TYPE_CHECKING:
    from halfway.coordinator.changes import Change
    from halfway.coordinator.ports import AuditTrail, CheckReply, Clock
    from halfway.coordinator.requests import GroupView
    from halfway.protocol.policy import CheckPolicy
    from halfway.protocol.principal import Principal
    from halfway.protocol.records import Group


log = structlog.get_logger(__name__)

DONE: Final = "done"
_OF_TRANSACTIONS: Final = frozenset({Audited.END_BY_HAND, Audited.CHECK_NOW, Audited.RESUME})
_ID_BYTES: Final = 16
T = TypeVar("T")


class Auditor:
    """Records the actions of this instance's callers. The instance that forwards a call records it, not the owner."""

    def __init__(
        self,
        trail: AuditTrail | None,
        clock: Clock,
        instance: str,
        find_group: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        """Store the parts. Without a `trail`, events are only logged. `instance` is this instance's name in events.

        `find_group` returns the group of a transaction, None if it is not known here.
        """
        self._trail = trail
        self._clock = clock
        self._instance = instance
        self._find_group = find_group
        self._of_transactions = LogSummary(log, "info", "audit_of_transactions")

    async def audit(
        self,
        work: Awaitable[T],
        principal: Principal,
        action: Audited,
        subject: str,
        *,
        group: str | None = None,
        remark: str | None = None,
        detail: str | None = None,
        describe: Callable[[T], dict[str, str]] | None = None,
    ) -> T:
        """Await `work`, and record it with its result; `describe` returns further fields from the result."""
        fields: dict[str, str | None] = {
            "action": action.value,
            "subject": subject,
            "group": group,
            "remark": remark,
            "detail": detail,
        }
        try:
            result = await work
        except (ForbiddenError, UnauthenticatedError):
            raise  # only counted: a caller without permissions must not fill the audit trail
        except HalfwayError as error:
            self._record(principal, fields, error.code)
            raise
        except BaseException:
            self._record(principal, fields, "interrupted")
            raise
        self._record(principal, fields if describe is None else {**fields, **describe(result)}, DONE)
        return result

    def record_end(self, change: Change, result: EndResult | Exception) -> None:
        if isinstance(result, ForbiddenError | UnauthenticatedError) or change.request is None:
            return  # only counted
        fields: dict[str, str | None] = {
            "action": Audited.END_BY_HAND.value,
            "subject": change.id,
            "group": None,
            "remark": change.remark,
            "detail": change.request.outcome.value,
        }
        failure = result.code if isinstance(result, HalfwayError) else "interrupted"
        self._record(change.principal, fields, DONE if isinstance(result, EndResult) else failure)

    def _record(self, principal: Principal, fields: dict[str, str | None], result: str) -> None:
        """Record an action. Those on transactions come by the thousand: the log summarises what the trail takes."""
        if fields["group"] is None and fields["action"] in _OF_TRANSACTIONS:
            group = self._find_group(fields["subject"] or "")
            if principal.group in (None, group):  # else a group's key could write into another group's events
                fields = fields | {"group": group}
        event = AuditEvent(
            id=token_hex(_ID_BYTES),
            at=self._clock.now_ms(),
            actor_kind=principal.kind.value,
            actor=principal.name,
            key_id=principal.key_id,
            result=result,
            instance=self._instance,
            **fields,  # type: ignore[arg-type]  # the remaining fields
        )
        is_in_trail = self._trail is not None and self._trail.record(event)
        if is_in_trail and event.action in _OF_TRANSACTIONS:
            names = ("action", "group", "actor", "detail", "remark", "result")
            self._of_transactions.note(
                {name: getattr(event, name) for name in names}, id=event.id, subject=event.subject
            )
        else:
            log.info("audit", **msgspec.structs.asdict(event))


def describe_group_change(before: Group | None, policy_before: CheckPolicy) -> Callable[[GroupView], dict[str, str]]:
    """Return a function that describes a change of a group: the changed parts, and the hosts of its URLs.

    The policies in force are compared. The rest of a URL may hold a secret.
    """

    def describe(after: GroupView) -> dict[str, str]:
        hosts = ", ".join(dict.fromkeys(URL(url).authority for url in after.check.urls)) or "pull"
        if after.created or before is None:
            action = Audited.REGISTER_GROUP if after.created else Audited.CHANGE_GROUP
            return {"action": action.value, "detail": hosts}
        now = {"mode": after.check.mode, "urls": after.check.urls, "topics": after.topics}
        changed = [part for part, value in now.items() if getattr(before, part) != value]
        if after.policy != policy_before:
            changed.append("policy")
        return {"detail": f"{', '.join(changed) or 'nothing'} changed; checks: {hosts}"}

    return describe


MAX_IDS: Final = 20_000
MAX_EVENTS_PER_ID: Final = 16
MAX_BYTES: Final = 64 * 1024 * 1024
"""The texts of all events. Equal texts are stored once and counted once."""


class Journal:
    """The last checks and acts of each transaction on this instance. The oldest transactions are dropped first."""

    def __init__(self, since: int) -> None:
        """Start empty at a time in ms since the epoch."""
        self.since = since
        self._events: dict[str, deque[HistoryEvent]] = {}
        self._texts: dict[str, int] = {}
        """The number of events that have each text."""
        self._bytes = 0

    def events_of(self, transaction_id: str) -> tuple[HistoryEvent, ...]:
        """Return the events of an id, the oldest first."""
        return tuple(self._events.get(transaction_id, ()))

    def add(self, transaction_id: str, event: HistoryEvent) -> None:
        events = self._events.pop(transaction_id, None)
        if events is None:
            events = deque()
        elif len(events) >= MAX_EVENTS_PER_ID:
            self._uncount(events.popleft())
        events.append(event)
        self._count(event)
        self._events[transaction_id] = events
        while len(self._events) > MAX_IDS or (self._bytes > MAX_BYTES and len(self._events) > 1):
            for dropped in self._events.pop(next(iter(self._events))):
                self._uncount(dropped)

    def _count(self, event: HistoryEvent) -> None:
        for text in _texts(event):
            count = self._texts.get(text, 0)
            self._bytes += 0 if count else getsizeof(text)
            self._texts[text] = count + 1

    def _uncount(self, event: HistoryEvent) -> None:
        for text in _texts(event):
            if self._texts[text] > 1:
                self._texts[text] -= 1
            else:
                del self._texts[text]
                self._bytes -= getsizeof(text)

    def add_check(self, transaction_id: str, number: int, reply: CheckReply, at: int) -> None:
        """Add a check with its number: one event for each endpoint that was tried."""
        for attempt in reply.attempts:
            event = HistoryEvent(
                at=Moment(at),
                event="check",
                attempt=number,
                verdict=reply.outcome.value if attempt.answered else "none",
                sent=attempt.sent,
                host=intern(attempt.host),
                status=attempt.status,
                # Thousands of checks may fail in the same way: equal texts are stored once.
                excerpt=None if attempt.excerpt is None else intern(attempt.excerpt),
                duration_s=round(attempt.duration_s, 4),
                detail=intern(attempt.detail) or None,
                remark=intern(reply.remark) if attempt.answered and reply.remark is not None else None,
            )
            self.add(transaction_id, event)


def _texts(event: HistoryEvent) -> list[str]:
    return [text for text in (event.excerpt, event.detail, event.remark) if text]
