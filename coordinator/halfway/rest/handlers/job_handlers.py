"""Calls about jobs: previewed, accepted, shown, stopped (docs/rest.md#jobs)."""

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
from halfway.service.job_records import JobSpec

if TYPE_CHECKING:
    from halfway.rest.handlers.calls import Call
    from halfway.service.job_records import JobAction, JobView
    from halfway.service.requests import TransactionFilter

_ID_BYTES = 12


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    spec: JobSpec
    preview: bool


async def start_job(call: Call) -> Answer:
    """Accept a job, or show what it would act on."""
    wanted = call.site.validation.read(models.JobRequest, call.body, _wanted)
    spec, jobs = wanted.spec, call.site.coordinator.jobs
    if wanted.preview:
        count, sample = await jobs.preview(spec, sample=models.SAMPLE, deadline=call.deadline, principal=call.principal)
        shown = models.JobPreview(
            preview=True,
            action=spec.action,
            count=count,
            more=count > spec.most,
            sample=[convert.summary(view) for view in sample],
        )
        return answer(HTTPStatus.OK, shown)
    view = await jobs.start(spec, deadline=call.deadline, principal=call.principal)
    status = HTTPStatus.ACCEPTED if view.created else HTTPStatus.OK
    return answer(status, _shown(call, view), ("Location", f"/v1/jobs/{spec.id}"))


async def list_jobs(call: Call) -> Answer:
    """Show the jobs of all instances."""
    found = await call.site.coordinator.jobs.all(deadline=call.deadline, principal=call.principal)
    of_one_group = call.principal.group is not None
    away = [
        models.JobPlace(instance=None, detail=AWAY)
        if of_one_group
        else models.JobPlace(instance=one.instance, detail=one.detail)
        for one in found.away
    ]
    return answer(HTTPStatus.OK, models.JobListResponse(jobs=[_shown(call, job) for job in found.jobs], away=away))


async def get_job(call: Call) -> Answer:
    """Show a job and a page of its items."""
    job_id = path_parameter("id", call.parameter, models.JobId)
    given = parameters(models.JobParameters, *call.query)
    page = await call.site.coordinator.jobs.page(
        job_id,
        result=given.result,
        start=given.cursor,
        limit=given.limit,
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
    fields = msgspec.structs.asdict(_shown(call, page.job))
    return answer(HTTPStatus.OK, models.JobPage(**fields, items=items, next=page.next))


async def stop_job(call: Call) -> Answer:
    """Have a job begin nothing more."""
    nothing_in(call.body)
    job_id = path_parameter("id", call.parameter, models.JobId)
    view = await call.site.coordinator.jobs.stop(job_id, deadline=call.deadline, principal=call.principal)
    return answer(HTTPStatus.ACCEPTED, _shown(call, view))


def _wanted(request: models.JobRequest) -> _Wanted:
    if (request.filter is None) == (request.ids is None):
        raise FieldRefusedError("filter", "give either a filter ({} for all that the action may act on) or ids")
    if not request.reason and not request.preview:
        raise FieldRefusedError("reason", "say why: it is kept as the remark of each transaction")
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
    return _Wanted(spec=spec, preview=request.preview)


def _filter(given: models.JobFilter, action: JobAction) -> TransactionFilter:
    wanted = to_filter(given)
    if wanted.state is not None and wanted.state not in action.states:
        raise FieldRefusedError("filter.state", f"{action} acts on what is {' or '.join(action.states)}")
    return wanted


def _shown(call: Call, view: JobView) -> models.JobResponse:
    """Show a job; a message's key in its filter only to those who may read payloads."""
    spec = view.spec
    found = view.found
    return models.JobResponse(
        id=spec.id,
        action=spec.action,
        filter=None if spec.filter is None else _shown_filter(call, spec.filter),
        ids=len(spec.ids) or None,
        reason=spec.reason,
        rate=spec.rate,
        most=spec.most,
        by=str(view.by),
        state=view.state,
        detail=view.detail,
        instance=view.instance,
        accepted_at=rfc3339(view.accepted_at),
        started_at=rfc3339_or_none(view.started_at),
        finished_at=rfc3339_or_none(view.finished_at),
        found=found,
        more=found is not None and found > spec.most,
        finished=sum(view.results.values()),
        results=view.results,
    )


def _shown_filter(call: Call, given: TransactionFilter) -> models.JobFilter:
    reads = call.site.coordinator.authority.may(call.principal, Permission.READ_PAYLOADS, call.principal.group)
    return models.JobFilter(
        state="prepared" if given.state is State.PREPARED else "parked" if given.state is State.PARKED else None,
        group=given.group,
        topic=given.topic,
        key=given.key.decode() if given.key is not None and reads else None,
        id=given.id,
        older_than_s=given.older_than_s,
        younger_than_s=given.younger_than_s,
        error=given.error,
    )
