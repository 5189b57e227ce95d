"""`POST /v1/batch`: many prepares, ends, checks and resumes in one request, each with an answer of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import structlog
from msgspec import UNSET

from halfway.coordinator import tracing
from halfway.coordinator.operations import Operation, results_of
from halfway.coordinator.requests import End, EndResult, Prepare, Prepared, TransactionView
from halfway.http.handlers.handlers import Call
from halfway.http.requests import models
from halfway.http.requests.validation import cause_of, given, to_action, to_batch_end
from halfway.http.responses import Answer, InternalError, answer, encoded, invalid, standing_alone
from halfway.protocol.errors import HalfwayError
from halfway.protocol.ids import canonical
from halfway.protocol.principal import Principal
from halfway.protocol.transactions import Cause

log = structlog.get_logger(__name__)

_SLICE_ITEMS: Final = 200
"""How many items a batch reads and begins before it yields to other requests."""
_SLICE_S: Final = 0.02
"""How long it reads items one by one before that."""

_OK: Final = HTTPStatus.OK.value
_CREATED: Final = HTTPStatus.CREATED.value
_ACCEPTED: Final = HTTPStatus.ACCEPTED.value

T = TypeVar("T")
R = TypeVar("R")
B = TypeVar("B", models.BatchRequest, models.WholeBatch)


Wanted = list[T | HalfwayError]
"""The items of a request; in place of one that is wrong there is its error."""
Acting = asyncio.Task[TransactionView]
"""A check or a resume."""


class BatchItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The answer to one item: its status with a body, or with a problem."""

    status: int
    body: Any = None
    problem: msgspec.Raw | None = None


class BatchResponse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The answers, in the order of the request."""

    prepare: list[BatchItem]
    end: list[BatchItem]
    check: list[BatchItem]
    resume: list[BatchItem]
    shards: models.Shards


class _Items(NamedTuple):
    """The items of a request by what is done."""

    prepare: Wanted[Prepare]
    end: Wanted[End]
    check: Wanted[models.BatchAction]
    resume: Wanted[models.BatchAction]


async def batch(call: Call) -> Answer:
    """Do all items concurrently; an item that fails does not disturb the others.

    Every end is handed to the service before the first is waited for, so that they share Kafka transactions.
    """
    coordinator = call.site.coordinator
    items = await _wanted(call, cause_of(call.request.headers))
    if tracing.is_on():
        prepares, ends = tracing.traced_items((items.prepare, items.end), call.request.headers)
        items = items._replace(prepare=prepares, end=ends)
    ended: list[Operation[EndResult]] = []
    prepared: list[Operation[Prepared]] = []
    checked: list[Acting] = []
    resumed: list[Acting] = []
    try:
        await _begin(call, items.end, coordinator.end, ended)
        await _begin(call, items.resume, partial(_act, coordinator.resume), resumed)
        await _begin(call, items.check, partial(_act, coordinator.check), checked)
        await _begin(call, items.prepare, coordinator.prepare, prepared)
        end_results = _in_order(items.end, await results_of(ended))
        resume_results = _in_order(items.resume, await asyncio.gather(*resumed, return_exceptions=True))
        check_results = _in_order(items.check, await asyncio.gather(*checked, return_exceptions=True))
        prepare_results = _in_order(items.prepare, await results_of(prepared))
    except BaseException:
        for begun in (ended, prepared, checked, resumed):
            for one in begun:
                one.cancel()  # nobody waits for the remaining answers any more
        raise
    shown = BatchResponse(
        prepare=[_prepared_item(one) for one in prepare_results],
        end=[_item(_OK, one) for one in end_results],
        check=[_view_item(_ACCEPTED, one) for one in check_results],
        resume=[_view_item(_OK, one) for one in resume_results],
        shards=models.Shards.of(coordinator.shards),
    )
    _note_refused(call, "batch_end", items.end, end_results, shown.end)
    _note_refused(call, "batch_resume", items.resume, resume_results, shown.resume)
    _note_refused(call, "batch_check", items.check, check_results, shown.check)
    _note_refused(call, "batch_prepare", items.prepare, prepare_results, shown.prepare)
    return answer(HTTPStatus.OK, shown)


def _act(
    do: Callable[..., Coroutine[Any, Any, TransactionView]],
    wanted: models.BatchAction,
    *,
    deadline: float,
    principal: Principal,
) -> Acting:
    return asyncio.create_task(
        do(canonical(wanted.id), remark=given(wanted.remark), deadline=deadline, principal=principal)
    )


def _note_refused(
    call: Call, operation: str, wanted: Wanted[Any], results: Sequence[object], shown: Sequence[BatchItem]
) -> None:
    for item, result, one in zip(wanted, results, shown, strict=True):
        if one.problem is not None:
            call.site.refusals.note(
                operation,
                one.status,
                getattr(result, "code", None),
                group=getattr(item, "group", None) or call.principal.group,
                id=getattr(item, "id", None),
                request_id=call.id,
            )


async def _wanted(call: Call, cause: Cause) -> _Items:
    """Read all items at once, or one by one if one of them is wrong."""
    validation, limit = call.site.validation, call.site.max_batch_items
    to_prepare, to_end = validation.to_prepare, partial(to_batch_end, cause=cause)

    def few(request: B) -> B:
        count = sum(len(given(items) or ()) for items in (request.prepare, request.end, request.check, request.resume))
        if not 0 < count <= limit:
            raise invalid([("", f"{count} items: from 1 to {limit} in one batch")])
        return request

    def converted(request: models.WholeBatch) -> _Items:
        few(request)
        return _Items(
            prepare=[to_prepare(one) for one in given(request.prepare) or ()],
            end=[to_end(one) for one in given(request.end) or ()],
            check=[to_action(one) for one in given(request.check) or ()],
            resume=[to_action(one) for one in given(request.resume) or ()],
        )

    whole = validation.read_whole(models.WholeBatch, call.body, converted)
    if whole is not None:
        return whole
    outline: models.BatchRequest = validation.read(models.BatchRequest, call.body, few)
    return _Items(
        prepare=await _each(partial(validation.read, models.PrepareRequest), outline.prepare, to_prepare),
        end=await _each(partial(validation.read, models.BatchEnd), outline.end, to_end),
        check=await _each(partial(validation.read, models.BatchAction), outline.check, to_action),
        resume=await _each(partial(validation.read, models.BatchAction), outline.resume, to_action),
    )


async def _each(read: Callable[..., T], raws: Sequence[msgspec.Raw], convert_one: Callable[[Any], T]) -> Wanted[T]:
    """Read items one by one, and yield to other requests in between."""
    found: Wanted[T] = []
    since = time.monotonic()
    for raw in raws:
        try:
            found.append(read(raw, convert_one))
        except HalfwayError as error:
            found.append(error)
        if time.monotonic() - since > _SLICE_S:
            await asyncio.sleep(0)
            since = time.monotonic()
    return found


async def _begin(call: Call, wanted: Wanted[T], begin: Callable[..., R], begun: list[R]) -> None:
    """Hand the items that are right to the service, in order."""
    deadline, principal = call.deadline, call.principal
    right = [one for one in wanted if not isinstance(one, HalfwayError)]
    for first in range(0, len(right), _SLICE_ITEMS):
        await call.site.coordinator.turns.next(principal.group)
        begun += [begin(one, deadline=deadline, principal=principal) for one in right[first : first + _SLICE_ITEMS]]


def _in_order(wanted: Wanted[T], found: list[R]) -> Sequence[R | HalfwayError]:
    """Return the answer to every item, in the order of the request."""
    if len(found) == len(wanted):
        return found
    rest = iter(found)
    return [one if isinstance(one, HalfwayError) else next(rest) for one in wanted]


def _prepared_item(done: Prepared | Exception) -> BatchItem:
    if isinstance(done, Exception):
        return _refused(done)
    return BatchItem(status=_CREATED if done.created else _OK, body=msgspec.structs.replace(done, created=UNSET))


def _view_item(status: int, done: TransactionView | BaseException) -> BatchItem:
    return _item(status, done if isinstance(done, BaseException) else models.summary(done))


def _item(status: int, done: object) -> BatchItem:
    if isinstance(done, BaseException):
        return _refused(done)
    return BatchItem(status=status, body=done)


def _refused(error: BaseException) -> BatchItem:
    if not isinstance(error, HalfwayError):
        log.error("batch_item_failed", exc_info=error)
        error = InternalError()
    document = standing_alone(error)
    return BatchItem(status=document["status"], problem=msgspec.Raw(encoded(document)))
