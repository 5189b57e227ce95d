"""`POST /v1/batch`: many prepares and ends in one request, each with an answer of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from halfway.domain.errors import HalfwayError, InvalidRequestError
from halfway.rest import convert, models
from halfway.rest.calls import ENCODER, Answer, answer, refusal, something_in
from halfway.rest.errors import InternalError, invalid

if TYPE_CHECKING:
    from halfway.rest.calls import Call

log = structlog.get_logger(__name__)

MAX_EXPLAINED: Final = 50
"""Of more items that are wrong, only the first wrong field of each is named."""


class BatchItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to one item: its status with a body, or with a problem."""

    status: int
    body: msgspec.Raw | None = None
    problem: msgspec.Raw | None = None


class BatchResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answers, in the order of the request."""

    prepare: list[BatchItem]
    end: list[BatchItem]


async def batch(call: Call) -> Answer:
    """Do every item at the same time; one that fails does not disturb the others.

    Every end is handed to the service before the first is waited for, so that they share Kafka transactions.
    """
    limit = call.site.max_batch_items

    def bounded(request: models.BatchRequest) -> models.BatchRequest:
        count = len(request.prepare) + len(request.end)
        if not 0 < count <= limit:
            raise invalid([("", f"{count} items: from 1 to {limit} in one batch")])
        return request

    request = call.site.validation.read(models.BatchRequest, something_in(call.body), bounded, explain=False)
    items = _Items(call)
    ends = [asyncio.ensure_future(items.done(items.end, raw)) for raw in request.end]
    prepares = [asyncio.ensure_future(items.done(items.prepare, raw)) for raw in request.prepare]
    answers = await asyncio.gather(*ends, *prepares)
    return answer(HTTPStatus.OK, BatchResponse(prepare=answers[len(ends) :], end=answers[: len(ends)]))


class _Items:
    """Does single items of one batch."""

    def __init__(self, call: Call) -> None:
        self._coordinator = call.site.coordinator
        self._validation = call.site.validation
        self._deadline = call.deadline
        self._credential = call.credential
        self._cause = call.cause
        self._to_prepare = partial(convert.prepare, internal_prefix=call.site.validation.internal_prefix)
        self._to_end = partial(convert.batch_end, cause=self._cause)
        self._wrong = 0

    async def done(self, do: Callable[[msgspec.Raw], Awaitable[BatchItem]], raw: msgspec.Raw) -> BatchItem:
        try:
            return await do(raw)
        except HalfwayError as error:
            self._wrong += isinstance(error, InvalidRequestError)
            return _refused(error)
        except Exception:
            log.exception("batch_item_failed")
            return _refused(InternalError())

    async def prepare(self, raw: msgspec.Raw) -> BatchItem:
        wanted = self._validation.read(models.PrepareRequest, raw, self._to_prepare, explain=self._explain())
        done = await self._coordinator.prepare(wanted, deadline=self._deadline, credential=self._credential)
        status = HTTPStatus.CREATED if done.created else HTTPStatus.OK
        return BatchItem(status=status, body=msgspec.Raw(ENCODER.encode(convert.prepared(done))))

    async def end(self, raw: msgspec.Raw) -> BatchItem:
        wanted = self._validation.read(models.BatchEnd, raw, self._to_end, explain=self._explain())
        done = await self._coordinator.end(wanted, deadline=self._deadline, credential=self._credential)
        body = models.EndResponse(id=done.id, state=done.state, changed=done.changed)
        return BatchItem(status=HTTPStatus.OK, body=msgspec.Raw(ENCODER.encode(body)))

    def _explain(self) -> bool:
        return self._wrong < MAX_EXPLAINED


def _refused(error: HalfwayError) -> BatchItem:
    told = refusal(error)
    return BatchItem(status=told.status, problem=msgspec.Raw(told.body or b""))
