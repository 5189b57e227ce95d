"""The actions of callers with their results, in the log and through the port `AuditTrail`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from secrets import token_hex
from typing import Final, TypeVar

import msgspec
import structlog
from yarl import URL

from halfway.coordinator.changes import Change
from halfway.coordinator.logging import LogSummary
from halfway.coordinator.ports import AuditTrail, Clock
from halfway.coordinator.requests import EndResult, GroupView
from halfway.protocol.errors import ForbiddenError, HalfwayError, UnauthenticatedError
from halfway.protocol.principal import Principal
from halfway.protocol.records import Audited, AuditEvent, CheckPolicy, Group

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
        describe: Callable[[T], dict[str, str]] | None = None,
    ) -> T:
        """Await `work`, and record it with its result; `describe` returns further fields from the result."""
        fields: dict[str, str | None] = {
            "action": action.value,
            "subject": subject,
            "group": group,
            "remark": remark,
            "detail": None,
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
        now = {"mode": after.check.mode, "urls": after.check.urls, "topics": after.topics, "limits": after.limits}
        changed = [part for part, value in now.items() if getattr(before, part) != value]
        if after.policy != policy_before:
            changed.append("policy")
        if after.reject_prepares != before.reject_prepares:
            changed.append(f"prepares {'refused' if after.reject_prepares else 'accepted'}")
        return {"detail": f"{', '.join(changed) or 'nothing'} changed; checks: {hosts}"}

    return describe
