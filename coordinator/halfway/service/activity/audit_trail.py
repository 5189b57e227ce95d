"""Records the actions of callers with their results, in the log and through the port `AuditTrail`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from secrets import token_hex
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import structlog
from yarl import URL

from halfway.domain.audit_trail import Audited, AuditEvent
from halfway.domain.errors import ForbiddenError, HalfwayError, UnauthenticatedError
from halfway.domain.principal import PrincipalKind
from halfway.domain.transaction import Cause
from halfway.service.log_summary import LogSummary
from halfway.service.requests import EndResult

if TYPE_CHECKING:
    from halfway.domain.policy import CheckPolicy
    from halfway.domain.principal import Principal
    from halfway.domain.records import Group
    from halfway.service.answers import Answers
    from halfway.service.ports import AuditTrail, Clock
    from halfway.service.requests import End, GroupView

log = structlog.get_logger(__name__)

DONE: Final = "done"
_OF_TRANSACTIONS: Final = frozenset({Audited.END_BY_HAND, Audited.CHECK_NOW, Audited.RESUME})
_ID_BYTES: Final = 16
T = TypeVar("T")


class LogOnlyAuditTrail:
    """The `AuditTrail` of a coordinator that records events only in its log."""

    def record(self, event: AuditEvent) -> bool:  # noqa: ARG002 - the port's
        """Return False: the `Auditor` logs every event."""
        return False


class Auditor:
    """Records the actions of this instance's callers. The instance that forwards a call records it, not the owner."""

    def __init__(
        self,
        trail: AuditTrail,
        clock: Clock,
        instance: str,
        find_group: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        """Store the parts. `instance` is the name of this instance in events.

        `find_group` returns the group of a transaction, None if it is not known here.
        """
        self._trail = trail
        self._clock = clock
        self._instance = instance
        self._find_group = find_group
        self._of_jobs = LogSummary(log, "info", "audit_of_job")

    async def audit(  # noqa: PLR0913 - the fields of an event
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
        of_job: bool = False,
    ) -> T:
        """Await `work`, and record it with its result; `describe` returns further fields from the result.

        What a job does to each transaction (`of_job`) is summarised in the log if the trail takes it.
        """
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
            self._record(principal, fields, error.code, of_job=of_job)
            raise
        except BaseException:
            self._record(principal, fields, "interrupted", of_job=of_job)
            raise
        self._record(principal, fields if describe is None else {**fields, **describe(result)}, DONE, of_job=of_job)
        return result

    def watch_ends(self, ends: Sequence[End], answers: Answers[EndResult], principal: Principal) -> None:
        """Record the manual ends among `ends` when they are answered."""

        def answered(index: int, result: EndResult | Exception) -> None:
            end = ends[index]
            if isinstance(result, ForbiddenError | UnauthenticatedError):
                return  # only counted
            if end.cause is not Cause.OPERATOR and principal.kind is not PrincipalKind.OPERATOR:
                return
            fields: dict[str, str | None] = {
                "action": Audited.END_BY_HAND.value,
                "subject": end.id,
                "group": None,
                "remark": end.remark,
                "detail": end.outcome.value,
            }
            failure = result.code if isinstance(result, HalfwayError) else "interrupted"
            self._record(principal, fields, DONE if isinstance(result, EndResult) else failure)

        answers.on_each_answer(answered)

    def _record(
        self, principal: Principal, fields: dict[str, str | None], result: str, *, of_job: bool = False
    ) -> None:
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
        if self._trail.record(event) and of_job:
            names = ("action", "group", "actor", "detail", "result")
            self._of_jobs.note({name: getattr(event, name) for name in names}, id=event.id, subject=event.subject)
        else:
            log.info("audit", **msgspec.structs.asdict(event))


def describe_group_change(before: Group | None, policy_before: CheckPolicy) -> Callable[[GroupView], dict[str, str]]:
    """Return a function that describes a change of a group: the changed parts, and the hosts of its URLs.

    The policies in force are compared. The rest of a URL may hold a secret.
    """

    def describe(after: GroupView) -> dict[str, str]:
        hosts = ", ".join(dict.fromkeys(URL(url).authority for url in after.urls)) or "pull"
        if after.created or before is None:
            action = Audited.REGISTER_GROUP if after.created else Audited.CHANGE_GROUP
            return {"action": action.value, "detail": hosts}
        changed = [part for part in ("mode", "urls", "topics") if getattr(before, part) != getattr(after, part)]
        if after.policy != policy_before:
            changed.append("policy")
        return {"detail": f"{', '.join(changed) or 'nothing'} changed; checks: {hosts}"}

    return describe
