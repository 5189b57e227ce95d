"""`POST /v1/batch`: many prepares and ends in one request, each with an answer of its own."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import structlog
from msgspec import UNSET

from halfway.coordinator.operations import results_of
from halfway.coordinator.requests import End, EndResult, Prepare, Prepared
from halfway.http.requests import models
from halfway.http.requests.validation import cause_of, to_batch_end
from halfway.http.responses.answer import Answer, answer
from halfway.http.responses.problems import InternalError, encoded, invalid, standing_alone
from halfway.protocol.errors import HalfwayError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfway.coordinator.operations import Operation
    from halfway.http.handlers.handlers import Call
    from halfway.protocol.transactions import Cause

log = structlog.get_logger(__name__)

_SLICE_ITEMS: Final = 200
"""How many items a batch reads and begins before it yields to other requests."""
_SLICE_S: Final = 0.02
"""How long it reads items one by one before that."""

_OK: Final = HTTPStatus.OK.value
_CREATED: Final = HTTPStatus.CREATED.value

T = TypeVar("T")
R = TypeVar("R")
B = TypeVar("B", models.BatchRequest, models.WholeBatch)


Wanted = list[T | HalfwayError]
"""The items of a request; in place of one that is wrong there is its error."""


class BatchItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The answer to one item: its status with a body, or with a problem."""

    status: int
    body: Any = None
    problem: msgspec.Raw | None = None


class BatchResponse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The answers, in the order of the request."""

    prepare: list[BatchItem]
    end: list[BatchItem]


async def batch(call: Call) -> Answer:
    """Do all items concurrently; an item that fails does not disturb the others.

    Every end is handed to the service before the first is waited for, so that they share Kafka transactions.
    """
    coordinator, cause = call.site.coordinator, cause_of(call.request.headers)
    prepares, ends = await _wanted(call, cause)
    ended: list[Operation[EndResult]] = []
    prepared: list[Operation[Prepared]] = []
    try:
        await _begin(call, ends, coordinator.end, ended)
        await _begin(call, prepares, coordinator.prepare, prepared)
        end_results = await _results(ends, ended)
        prepare_results = await _results(prepares, prepared)
    except BaseException:
        for begun in (ended, prepared):
            for one in begun:
                one.cancel()  # nobody waits for the remaining answers any more
        raise
    shown_ends = [_ended_item(one) for one in end_results]
    shown_prepares = [_prepared_item(one) for one in prepare_results]
    _note_refused(call, "batch_end", ends, end_results, shown_ends)
    _note_refused(call, "batch_prepare", prepares, prepare_results, shown_prepares)
    return answer(HTTPStatus.OK, BatchResponse(prepare=shown_prepares, end=shown_ends))


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


async def _wanted(call: Call, cause: Cause) -> tuple[Wanted[Prepare], Wanted[End]]:
    """Read all items at once, or one by one if one of them is wrong."""
    validation, limit = call.site.validation, call.site.max_batch_items
    to_prepare, to_end = validation.to_prepare, partial(to_batch_end, cause=cause)

    def few(request: B) -> B:
        count = len(request.prepare) + len(request.end)
        if not 0 < count <= limit:
            raise invalid([("", f"{count} items: from 1 to {limit} in one batch")])
        return request

    def converted(request: models.WholeBatch) -> tuple[Wanted[Prepare], Wanted[End]]:
        few(request)
        return [to_prepare(one) for one in request.prepare], [to_end(one) for one in request.end]

    whole = validation.read_whole(models.WholeBatch, call.body, converted)
    if whole is not None:
        return whole
    outline: models.BatchRequest = validation.read(models.BatchRequest, call.body, few)
    prepares = await _each(partial(validation.read, models.PrepareRequest), outline.prepare, to_prepare)
    return prepares, await _each(partial(validation.read, models.BatchEnd), outline.end, to_end)


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


async def _begin(call: Call, wanted: Wanted[T], begin: Callable[..., Operation[R]], begun: list[Operation[R]]) -> None:
    """Hand the items that are right to the service, in order."""
    deadline, principal = call.deadline, call.principal
    right = [one for one in wanted if not isinstance(one, HalfwayError)]
    for first in range(0, len(right), _SLICE_ITEMS):
        await call.site.coordinator.turns.next(principal.group)
        begun += [begin(one, deadline=deadline, principal=principal) for one in right[first : first + _SLICE_ITEMS]]


async def _results(wanted: Wanted[T], begun: Sequence[Operation[R]]) -> Sequence[R | Exception]:
    """Return the answer to every item, in the order of the request."""
    found = await results_of(begun)
    if len(found) == len(wanted):
        return found
    rest = iter(found)
    return [one if isinstance(one, HalfwayError) else next(rest) for one in wanted]


def _prepared_item(done: Prepared | Exception) -> BatchItem:
    if isinstance(done, Exception):
        return _refused(done)
    return BatchItem(status=_CREATED if done.created else _OK, body=msgspec.structs.replace(done, created=UNSET))


def _ended_item(done: EndResult | Exception) -> BatchItem:
    if isinstance(done, Exception):
        return _refused(done)
    return BatchItem(status=_OK, body=done)


def _refused(error: Exception) -> BatchItem:
    if not isinstance(error, HalfwayError):
        log.error("batch_item_failed", exc_info=error)
        error = InternalError()
    document = standing_alone(error)
    return BatchItem(status=document["status"], problem=msgspec.Raw(encoded(document)))
