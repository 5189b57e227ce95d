"""Calls that preview, start, show and stop jobs (docs/rest.md#jobs)."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from secrets import token_hex
from typing import TYPE_CHECKING

import msgspec

from halfway.domain.message_json import rfc3339
from halfway.domain.principal import Permission
from halfway.domain.records import MAX_REMARK_BYTES
from halfway.domain.transaction import State
from halfway.rest.handlers.calls import nothing_in
from halfway.rest.handlers.statistics_handlers import AWAY
from halfway.rest.requests import convert, schemas
from halfway.rest.requests import job_models as models
from halfway.rest.requests.data import rfc3339_or_none
from halfway.rest.requests.validation import FieldRefusedError, parameters, path_parameter, to_filter
from halfway.rest.responses.answer import Answer, answer
from halfway.service.records.job_records import JobSpec

if TYPE_CHECKING:
    from halfway.rest.handlers.calls import Call
    from halfway.service.records.job_records import JobAction, JobView
    from halfway.service.requests import TransactionFilter

_ID_BYTES = 12


@dataclass(frozen=True, kw_only=True)
class _JobStart:
    spec: JobSpec
    preview: bool


async def start_job(call: Call) -> Answer:
    """Accept a job, or preview what it would act on."""
    start = call.site.validation.read(models.JobRequest, call.body, _to_start)
    spec, jobs = start.spec, call.site.coordinator.jobs
    if start.preview:
        count, sample = await jobs.preview(spec, sample=models.SAMPLE, deadline=call.deadline, principal=call.principal)
        preview = models.JobPreview(
            preview=True,
            action=spec.action,
            count=count,
            more=count > spec.most,
            sample=[convert.summary(view) for view in sample],
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
        models.JobPlace(instance=None, detail=AWAY)
        if of_one_group
        else models.JobPlace(instance=place.instance, detail=place.detail)
        for place in listing.away
    ]
    jobs = [_job_response(call, job) for job in listing.jobs]
    return answer(HTTPStatus.OK, models.JobListResponse(jobs=jobs, away=away))


async def get_job(call: Call) -> Answer:
    """Show a job and a page of its items."""
    job_id = path_parameter("id", call.parameter, models.JobId)
    query = parameters(models.JobParameters, *call.query)
    page = await call.site.coordinator.jobs.page(
        job_id,
        result=query.result,
        start=query.cursor,
        limit=query.limit,
        deadline=call.deadline,
        principal=call.principal,
    )
    items = [
        models.JobItem(
            id=item.id,
            result=item.result,
            state=item.state,
            error_code=item.error_code,
            detail=item.detail,
            at=rfc3339_or_none(item.at),
        )
        for item in page.items
    ]
    fields = msgspec.structs.asdict(_job_response(call, page.job))
    return answer(HTTPStatus.OK, models.JobPage(**fields, items=items, next=page.next))


async def stop_job(call: Call) -> Answer:
    """Stop a job: it starts no further item."""
    nothing_in(call.body)
    job_id = path_parameter("id", call.parameter, models.JobId)
    view = await call.site.coordinator.jobs.stop(job_id, deadline=call.deadline, principal=call.principal)
    return answer(HTTPStatus.ACCEPTED, _job_response(call, view))


def _to_start(request: models.JobRequest) -> _JobStart:
    if (request.filter is None) == (request.ids is None):
        raise FieldRefusedError("filter", "give either a filter ({} for every transaction of the action) or ids")
    if not request.reason and not request.preview:
        raise FieldRefusedError("reason", "missing: it is stored as the remark of each transaction")
    if request.reason is not None and not schemas.remark_fits(request.reason):
        raise FieldRefusedError("reason", f"larger than {MAX_REMARK_BYTES} bytes")
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


def _filter(request: models.JobFilter, action: JobAction) -> TransactionFilter:
    transactions = to_filter(request)
    if transactions.state is not None and transactions.state not in action.states:
        raise FieldRefusedError("filter.state", f"{action} acts on {' or '.join(action.states)} transactions only")
    return transactions


def _job_response(call: Call, view: JobView) -> models.JobResponse:
    """Convert a job. A message key in its filter is shown only to callers that may read payloads."""
    spec = view.spec
    found = view.found
    return models.JobResponse(
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
        accepted_at=rfc3339(view.accepted_at),
        started_at=rfc3339_or_none(view.started_at),
        finished_at=rfc3339_or_none(view.finished_at),
        found=found,
        more=found is not None and found > spec.most,
        finished=sum(view.results.values()),
        results=view.results,
    )


def _job_filter(call: Call, transactions: TransactionFilter) -> models.JobFilter:
    may_read = call.site.coordinator.authority.may(call.principal, Permission.READ_PAYLOADS, call.principal.group)
    state = transactions.state
    return models.JobFilter(
        state="prepared" if state is State.PREPARED else "parked" if state is State.PARKED else None,
        group=transactions.group,
        topic=transactions.topic,
        key=transactions.key.decode() if transactions.key is not None and may_read else None,
        id=transactions.id,
        older_than_s=transactions.older_than_s,
        younger_than_s=transactions.younger_than_s,
        error=transactions.error,
    )
