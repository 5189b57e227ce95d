"""Records who changed what, with its result: to the log always, and to the port `AuditTrail`."""

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
from halfway.service.requests import EndResult

if TYPE_CHECKING:
    from halfway.domain.principal import Principal
    from halfway.domain.records import Group
    from halfway.service.answers import Answers
    from halfway.service.ports import AuditTrail, Clock
    from halfway.service.requests import End, GroupSpec, GroupView

log = structlog.get_logger(__name__)

DONE: Final = "done"
_ID_BYTES: Final = 16
T = TypeVar("T")


class LogOnly:
    """The `AuditTrail` of a coordinator that keeps events in its log alone."""

    def record(self, event: AuditEvent) -> None:
        """Leave it to the log."""


class Auditor:
    """Records what callers of this instance did; one that passes a call on records it, the owner does not."""

    def __init__(self, trail: AuditTrail, clock: Clock, instance: str) -> None:
        """Keep the parts; `instance` is what events call this instance."""
        self._trail = trail
        self._clock = clock
        self._instance = instance

    async def of(
        self,
        work: Awaitable[T],
        principal: Principal,
        action: Audited,
        subject: str,
        *,
        group: str | None = None,
        remark: str | None = None,
        detail: str | None = None,
        told: Callable[[T], dict[str, str]] | None = None,
    ) -> T:
        """Do some work, and record it with its result; `told` returns fields that only the result tells."""
        fields: dict[str, str | None] = {
            "action": action.value,
            "subject": subject,
            "group": group,
            "remark": remark,
            "detail": detail,
        }
        try:
            done = await work
        except (ForbiddenError, UnauthenticatedError):
            raise  # what a caller has no right to do is counted only: who may do nothing must not fill the trail
        except HalfwayError as error:
            self._record(principal, fields, error.code)
            raise
        except BaseException:
            self._record(principal, fields, "interrupted")
            raise
        self._record(principal, fields if told is None else {**fields, **told(done)}, DONE)
        return done

    def watch_ends(self, ends: Sequence[End], answers: Answers[EndResult], principal: Principal) -> None:
        """Record those ends that are by hand as they are answered."""

        def answered(index: int, result: EndResult | Exception) -> None:
            end = ends[index]
            if isinstance(result, ForbiddenError | UnauthenticatedError):
                return  # what a caller has no right to do is counted only
            if end.cause is not Cause.OPERATOR and principal.kind is not PrincipalKind.OPERATOR:
                return
            fields: dict[str, str | None] = {
                "action": Audited.END_BY_HAND.value,
                "subject": end.id,
                "group": None,
                "remark": end.remark,
                "detail": end.outcome.value,
            }
            told = result.code if isinstance(result, HalfwayError) else "interrupted"
            self._record(principal, fields, DONE if isinstance(result, EndResult) else told)

        answers.watch(answered)

    def _record(self, principal: Principal, fields: dict[str, str | None], result: str) -> None:
        event = AuditEvent(
            id=token_hex(_ID_BYTES),
            at=self._clock.now_ms(),
            actor_kind=principal.kind.value,
            actor=principal.name,
            key_id=principal.key_id,
            result=result,
            instance=self._instance,
            **fields,  # type: ignore[arg-type]  # the four that are left
        )
        log.info("audit", **msgspec.structs.asdict(event))
        self._trail.record(event)


def group_told(spec: GroupSpec, before: Group | None) -> Callable[[GroupView], dict[str, str]]:
    """Return what a registration tells: its changed parts, and the hosts; the rest of a URL may hold a secret."""
    hosts = ", ".join(dict.fromkeys(URL(url).authority for url in spec.urls)) or "pull"

    def told(after: GroupView) -> dict[str, str]:
        if after.created or before is None:
            action = Audited.REGISTER_GROUP if after.created else Audited.CHANGE_GROUP
            return {"action": action.value, "detail": hosts}
        parts = ("mode", "urls", "topics", "policy")
        changed = [part for part in parts if getattr(before, part) != getattr(spec, part)]
        return {"detail": f"{', '.join(changed) or 'nothing'} changed; checks: {hosts}"}

    return told
