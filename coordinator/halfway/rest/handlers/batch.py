"""`POST /v1/batch`: many prepares and ends in one request, each with an answer of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import structlog

from halfway.domain.errors import HalfwayError
from halfway.rest.handlers.calls import ENCODER, Answer, answer, refusal, something_in
from halfway.rest.requests import convert, models
from halfway.rest.requests.validation import ExplanationBudget
from halfway.rest.responses.errors import InternalError, invalid

if TYPE_CHECKING:
    from halfway.rest.handlers.calls import Call
    from halfway.service.requests import EndResult, Prepared

log = structlog.get_logger(__name__)

T = TypeVar("T")
_SLICE_S: Final = 0.02
"""How long a batch reads items before it yields to other requests."""


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
    """Do all items concurrently; an item that fails does not disturb the others.

    Every end is handed to the service before the first is waited for, so that they share Kafka transactions. If that
    takes long, it yields to other requests in between.
    """
    limit = call.site.max_batch_items

    def bounded(request: models.BatchRequest) -> models.BatchRequest:
        count = len(request.prepare) + len(request.end)
        if not 0 < count <= limit:
            raise invalid([("", f"{count} items: from 1 to {limit} in one batch")])
        return request

    request = call.site.validation.read(models.BatchRequest, something_in(call.body), bounded)
    items = _Items(call)
    ends: list[asyncio.Future[EndResult] | BatchItem] = []
    prepares: list[asyncio.Future[Prepared] | BatchItem] = []
    try:
        await items.begin_each(items.end, request.end, ends)
        await items.begin_each(items.prepare, request.prepare, prepares)
        ended = [await items.done(one, ended_item) for one in ends]
        prepared = [await items.done(one, prepared_item) for one in prepares]
    finally:
        for one in (*ends, *prepares):
            if isinstance(one, asyncio.Future):
                one.cancel()  # nobody waits for the remaining answers any more
    return answer(HTTPStatus.OK, BatchResponse(prepare=prepared, end=ended))


class _Items:
    """Does the items of one batch."""

    def __init__(self, call: Call) -> None:
        self._coordinator = call.site.coordinator
        self._validation = call.site.validation
        self._deadline = call.deadline
        self._credential = call.credential
        self._cause = call.cause
        self._to_prepare = partial(convert.prepare, internal_prefix=call.site.validation.internal_prefix)
        self._to_end = partial(convert.batch_end, cause=self._cause)
        self._explaining = ExplanationBudget()

    async def begin_each(
        self,
        begin: Callable[[msgspec.Raw], asyncio.Future[T]],
        raws: Sequence[msgspec.Raw],
        begun: list[asyncio.Future[T] | BatchItem],
    ) -> None:
        """Hand items to the service in order, and append the future or the problem of each to `begun`."""
        since = time.monotonic()
        for raw in raws:
            begun.append(self._begun(begin, raw))
            if time.monotonic() - since > _SLICE_S:
                await asyncio.sleep(0)
                since = time.monotonic()

    def _begun(
        self, begin: Callable[[msgspec.Raw], asyncio.Future[T]], raw: msgspec.Raw
    ) -> asyncio.Future[T] | BatchItem:
        """Hand an item to the service; an error is its answer."""
        try:
            return begin(raw)
        except Exception as error:  # noqa: BLE001 - an item that fails does not disturb the others
            return self._failed(error)

    async def done(self, begun: asyncio.Future[T] | BatchItem, shown: Callable[[T], BatchItem]) -> BatchItem:
        """Return the answer to an item."""
        if isinstance(begun, BatchItem):
            return begun
        try:
            return shown(await begun)
        except Exception as error:  # noqa: BLE001 - as above
            return self._failed(error)

    def prepare(self, raw: msgspec.Raw) -> asyncio.Future[Prepared]:
        wanted = self._validation.read(models.PrepareRequest, raw, self._to_prepare, explaining=self._explaining)
        return self._coordinator.begin_prepare(wanted, deadline=self._deadline, credential=self._credential)

    def end(self, raw: msgspec.Raw) -> asyncio.Future[EndResult]:
        wanted = self._validation.read(models.BatchEnd, raw, self._to_end, explaining=self._explaining)
        return self._coordinator.begin_end(wanted, deadline=self._deadline, credential=self._credential)

    def _failed(self, error: Exception) -> BatchItem:
        if isinstance(error, HalfwayError):
            return _refused(error)
        log.error("batch_item_failed", exc_info=error)
        return _refused(InternalError())


def prepared_item(done: Prepared) -> BatchItem:
    """Return the item for a prepare."""
    status = HTTPStatus.CREATED if done.created else HTTPStatus.OK
    return BatchItem(status=status, body=msgspec.Raw(ENCODER.encode(convert.prepared(done))))


def ended_item(done: EndResult) -> BatchItem:
    """Return the item for an end."""
    body = models.EndResponse(id=done.id, state=done.state, changed=done.changed)
    return BatchItem(status=HTTPStatus.OK, body=msgspec.Raw(ENCODER.encode(body)))


def _refused(error: HalfwayError) -> BatchItem:
    told = refusal(error)
    return BatchItem(status=told.status, problem=msgspec.Raw(told.body or b""))
