"""The calls of operators: jobs, keys, histories, and statistics once or as events.

See docs/rest.md#jobs and docs/rest.md#statistics.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from secrets import token_hex
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import UNSET

from halfway.coordinator.access import KeySpec
from halfway.coordinator.records import JobSpec
from halfway.coordinator.requests import Moment, moment
from halfway.http.handlers.handlers import nothing_in
from halfway.http.handlers.statistics import AWAY, to_response
from halfway.http.requests import bodies, models, operator_models
from halfway.http.requests.bodies import mismatch, short
from halfway.http.requests.models import TransactionId
from halfway.http.requests.validation import FieldRefusedError, parameters, path_parameter, to_filter
from halfway.http.responses.answer import Answer, answer
from halfway.protocol.errors import AccessControlOffError
from halfway.protocol.principal import Permission, PrincipalKind
from halfway.protocol.records import MAX_REMARK_BYTES, Audited
from halfway.protocol.transactions import State

if TYPE_CHECKING:
    from halfway.coordinator.access import Keys, NewKey
    from halfway.coordinator.records import JobAction, JobView
    from halfway.coordinator.requests import TransactionFilter
    from halfway.http.handlers.handlers import Call
    from halfway.protocol.keys import Key


M = TypeVar("M")
T = TypeVar("T")


async def create_key(call: Call) -> Answer:
    """Create a key, or bind a certificate."""
    keys = _keys(call)
    request = call.site.validation.read(models.KeyRequest, call.body, _identity)
    spec = KeySpec(
        kind=PrincipalKind(request.kind),
        name=request.name,
        expires_in_ms=_to_ms(request.expires_in_s),
        certificate=request.certificate,
    )
    work = keys.create(spec, deadline=call.deadline, principal=call.principal)
    return _created(await _audited(call, work, Audited.CREATE_KEY, request.name, _describe_new))


async def rotate_key(call: Call) -> Answer:
    """Create another key for the principal of a key. The old key then expires."""
    keys = _keys(call)
    key_id = path_parameter("id", call.parameter, models.KeyId)
    request = call.site.validation.read(models.RotateRequest, call.body or b"{}", _identity)
    work = keys.rotate(
        key_id,
        keep_ms=round(request.keep_s * 1000),
        expires_in_ms=_to_ms(request.expires_in_s),
        deadline=call.deadline,
        principal=call.principal,
    )
    return _created(await _audited(call, work, Audited.ROTATE_KEY, key_id, _describe_new))


async def list_keys(call: Call) -> Answer:
    """Show a page of the keys, without their secrets."""
    keys = _keys(call)
    query = parameters(models.KeyParameters, *call.query)
    page = await keys.page(
        name=query.name, limit=query.limit, after=query.cursor, deadline=call.deadline, principal=call.principal
    )
    listed = [models.KeyResponse(**_fields(key)) for key in page.keys]
    return answer(HTTPStatus.OK, models.KeyList(keys=listed, next=page.next))


async def revoke_key(call: Call) -> Answer:
    """Revoke a key."""
    keys = _keys(call)
    key_id = path_parameter("id", call.parameter, models.KeyId)
    work = keys.revoke(key_id, deadline=call.deadline, principal=call.principal)
    await _audited(call, work, Audited.REVOKE_KEY, key_id, _describe)
    return answer(HTTPStatus.NO_CONTENT)


def _keys(call: Call) -> Keys:
    keys = call.site.coordinator.keys
    if keys is None:
        raise AccessControlOffError
    return keys


async def _audited(
    call: Call, work: Awaitable[T], action: Audited, subject: str, describe: Callable[[T], dict[str, str]]
) -> T:
    return await call.site.coordinator.auditor.audit(work, call.principal, action, subject, describe=describe)


def _describe_new(new: NewKey) -> dict[str, str]:
    return _describe(new.key) | {"subject": new.key.id}


def _describe(key: Key) -> dict[str, str]:
    group = {"group": key.name} if key.kind is PrincipalKind.GROUP else {}
    return group | {"detail": f"of {key.kind.value} {key.name}"}


def _identity(request: M) -> M:
    return request


def _to_ms(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


def _created(new: NewKey) -> Answer:
    response = models.NewKeyResponse(**_fields(new.key), key=new.text)
    return answer(HTTPStatus.CREATED, response, ("Location", f"/v1/keys/{new.key.id}"), ("Cache-Control", "no-store"))


def _fields(key: Key) -> dict[str, Any]:
    return {
        "id": key.id,
        "kind": key.kind.value,
        "name": key.name,
        "created_at": Moment(key.created_at),
        "expires_at": moment(key.expires_at),
        "certificate": key.certificate,
    }


async def get_history(call: Call) -> Answer:
    """Show what happened to a transaction."""
    transaction_id = path_parameter("id", call.parameter, TransactionId)
    history = await call.site.coordinator.history(transaction_id, deadline=call.deadline, principal=call.principal)
    return answer(HTTPStatus.OK, msgspec.structs.replace(history, complete=not history.missing))


async def get_statistics(call: Call) -> Answer:
    """Show the statistics of all instances."""
    group = parameters(operator_models.StatisticsParameters, *call.query).group or call.principal.group
    statistics = await call.site.coordinator.statistics.gather(group=group, principal=call.principal)
    return answer(HTTPStatus.OK, to_response(statistics, of_one_group=group is not None))


async def get_events(call: Call) -> Answer:  # noqa: ARG001 - every handler takes the call
    """Accept a listener. The server sends the events."""
    return answer(HTTPStatus.OK)


_ID_BYTES = 12


@dataclass(frozen=True, kw_only=True)
class _JobStart:
    spec: JobSpec
    preview: bool


async def start_job(call: Call) -> Answer:
    """Accept a job, or preview what it would act on."""
    start = call.site.validation.read(operator_models.JobRequest, call.body, _to_start)
    spec, jobs = start.spec, call.site.coordinator.jobs
    if start.preview:
        count, sample = await jobs.preview(
            spec, sample=operator_models.SAMPLE, deadline=call.deadline, principal=call.principal
        )
        preview = operator_models.JobPreview(
            preview=True,
            action=spec.action,
            count=count,
            more=count > spec.most,
            sample=[models.summary(view) for view in sample],
        )
        return answer(HTTPStatus.OK, preview)
    view = await jobs.start(spec, deadline=call.deadline, principal=call.principal)
    status = HTTPStatus.ACCEPTED if view.created else HTTPStatus.OK
    return answer(status, _job_response(call, view), ("Location", f"/v1/jobs/{spec.id}"))


async def list_jobs(call: Call) -> Answer:
    """Show the jobs of all instances."""
    listing = await call.site.coordinator.jobs.all(deadline=call.deadline, principal=call.principal)
    of_one_group = call.principal.group is not None
    away = [
        operator_models.JobPlace(instance=None, detail=AWAY)
        if of_one_group
        else operator_models.JobPlace(instance=place.instance, detail=place.detail)
        for place in listing.away
    ]
    jobs = [_job_response(call, job) for job in listing.jobs]
    return answer(HTTPStatus.OK, operator_models.JobListResponse(jobs=jobs, away=away))


async def get_job(call: Call) -> Answer:
    """Show a job and a page of its items."""
    job_id = path_parameter("id", call.parameter, operator_models.JobId)
    query = parameters(operator_models.JobParameters, *call.query)
    page = await call.site.coordinator.jobs.page(
        job_id,
        result=query.result,
        start=query.cursor,
        limit=query.limit,
        deadline=call.deadline,
        principal=call.principal,
    )
    items = tuple(msgspec.structs.replace(item, prepared_at=UNSET) for item in page.items)
    fields = msgspec.structs.asdict(_job_response(call, page.job))
    return answer(HTTPStatus.OK, operator_models.JobPage(**fields, items=items, next=page.next))


async def stop_job(call: Call) -> Answer:
    """Stop a job: it starts no further item."""
    nothing_in(call.body)
    job_id = path_parameter("id", call.parameter, operator_models.JobId)
    view = await call.site.coordinator.jobs.stop(job_id, deadline=call.deadline, principal=call.principal)
    return answer(HTTPStatus.ACCEPTED, _job_response(call, view))


def _to_start(request: operator_models.JobRequest) -> _JobStart:
    if (request.filter is None) == (request.ids is None):
        raise FieldRefusedError("filter", "give either a filter ({} for every transaction of the action) or ids")
    if not request.reason and not request.preview:
        raise FieldRefusedError("reason", "missing: it is stored as the remark of each transaction")
    if request.reason is not None and not bodies.remark_fits(request.reason):
        raise FieldRefusedError("reason", mismatch(short(request.reason), f"at most {MAX_REMARK_BYTES} bytes"))
    spec = JobSpec(
        id=request.id or token_hex(_ID_BYTES),
        action=request.action,
        filter=None if request.filter is None else _filter(request.filter, request.action),
        ids=tuple(request.ids or ()),
        reason=request.reason or "",
        rate=request.rate,
        most=request.most,
    )
    return _JobStart(spec=spec, preview=request.preview)


def _filter(request: operator_models.JobFilter, action: JobAction) -> TransactionFilter:
    transactions = to_filter(request)
    if transactions.state is not None and transactions.state not in action.states:
        raise FieldRefusedError("filter.state", f"{action} acts on {' or '.join(action.states)} transactions only")
    return transactions


def _job_response(call: Call, view: JobView) -> operator_models.JobResponse:
    """Convert a job. A message key in its filter is shown only to callers that may read payloads."""
    spec = view.spec
    found = view.found
    return operator_models.JobResponse(
        id=spec.id,
        action=spec.action,
        filter=None if spec.filter is None else _job_filter(call, spec.filter),
        ids=len(spec.ids) or None,
        reason=spec.reason,
        rate=spec.rate,
        most=spec.most,
        by=str(view.by),
        state=view.state,
        detail=view.detail,
        instance=view.instance if call.principal.group is None else None,
        accepted_at=view.accepted_at,
        started_at=view.started_at,
        finished_at=view.finished_at,
        found=found,
        more=found is not None and found > spec.most,
        finished=sum(view.results.values()),
        results=view.results,
    )


def _job_filter(call: Call, transactions: TransactionFilter) -> operator_models.JobFilter:
    may_read = call.site.coordinator.authority.may(call.principal, Permission.READ_PAYLOADS, call.principal.group)
    state = transactions.state
    return operator_models.JobFilter(
        state="prepared" if state is State.PREPARED else "parked" if state is State.PARKED else None,
        group=transactions.group,
        topic=transactions.topic,
        key=transactions.key.decode() if transactions.key is not None and may_read else None,
        id=transactions.id,
        older_than_s=transactions.older_than_s,
        younger_than_s=transactions.younger_than_s,
        error=transactions.error,
    )
