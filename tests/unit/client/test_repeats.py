"""The client's reaction to each kind of answer: it waits, retries, or raises an error with a remedy."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web

from halfway.client import (
    AlreadyEndedError,
    EndUnconfirmedError,
    Halfway,
    HalfwayError,
    IdReusedError,
    OutcomeExpiredError,
    RefusedError,
    SyncHalfway,
    UnknownTransactionError,
)
from halfway.client.barrier import UncommittedConnectionError
from halfway.client.errors import error_of
from tests.support.client.serving import serving
from tests.support.waiting import GENEROUS_S


class PreparedAnswers:
    """Answers each request, or each item of a batch, with the next prepared answer."""

    def __init__(self) -> None:
        self.items: list[Mapping[str, Any]] = []
        self.whole: list[tuple[int, dict[str, str]]] = []
        self.asked_at: list[float] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked_at.append(asyncio.get_running_loop().time())
        ((kind, items),) = (await request.json()).items()
        if self.whole:
            status, headers = self.whole.pop(0)
            return web.json_response({"error_code": "overloaded", "detail": "later"}, status=status, headers=headers)
        return web.json_response({kind: [self.items.pop(0) for _ in items]})


@pytest.fixture
async def prepared_answers() -> AsyncIterator[PreparedAnswers]:
    prepared_answers = PreparedAnswers()
    async with serving(prepared_answers.answer, "/v1/batch") as prepared_answers.url:
        yield prepared_answers


DONE: Mapping[str, Any] = {"status": 200, "body": {"state": "committed"}}


async def test_retry_after_is_obeyed(prepared_answers: PreparedAnswers) -> None:
    """In a whole answer, and in an item's; without it the client returns much sooner."""
    prepared_answers.whole = [(429, {"Retry-After": "1"})]
    later = {"error_code": "shard_unavailable", "detail": "moving", "retry_after_s": 1}
    prepared_answers.items = [{"status": 503, "problem": later}, DONE]
    async with Halfway(prepared_answers.url, "shop", end_timeout_s=GENEROUS_S) as client:
        await client.end("a", "commit")
    first, second, third = prepared_answers.asked_at
    assert second - first >= 1
    assert third - second >= 1


async def test_a_wait_beyond_the_deadline_is_told_at_once(prepared_answers: PreparedAnswers) -> None:
    prepared_answers.whole = [(503, {"Retry-After": "600"})]
    async with Halfway(prepared_answers.url, "shop", end_timeout_s=GENEROUS_S) as client:
        with pytest.raises(EndUnconfirmedError, match="503 overloaded: later"):
            await client.end("a", "commit")
    assert len(prepared_answers.asked_at) == 1


@pytest.mark.parametrize(
    "status, code, kind, remedy",
    [
        (404, "unknown_transaction", UnknownTransactionError, "does not mean that the transaction was rolled back"),
        (409, "already_ended", AlreadyEndedError, "compare it with your database"),
        (409, "id_reused", IdReusedError, "give each transaction its own id"),
        (410, "outcome_expired", OutcomeExpiredError, "does not mean rolled back"),
    ],
)
async def test_a_refusal_is_an_error_that_says_what_to_do(
    prepared_answers: PreparedAnswers, status: int, code: str, kind: type[RefusedError], remedy: str
) -> None:
    """The call is not repeated."""
    prepared_answers.items = [
        {"status": status, "problem": {"status": status, "error_code": code, "detail": "so it is"}}
    ]
    async with Halfway(prepared_answers.url, "shop") as client:
        with pytest.raises(kind, match="so it is") as told:
            await client.end("a", "commit")
    assert (told.value.status, told.value.error_code, len(prepared_answers.asked_at)) == (status, code, 1)
    assert remedy in " ".join((kind.__doc__ or "").split())


async def test_a_date_in_retry_after_is_obeyed_as_well(prepared_answers: PreparedAnswers) -> None:
    """Proxies send dates; a date in the past means no wait, and an invalid value is ignored."""
    later = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    prepared_answers.whole = [(503, {"Retry-After": later})]
    async with Halfway(prepared_answers.url, "shop", end_timeout_s=600) as client:
        with pytest.raises(EndUnconfirmedError, match="503 overloaded"):
            await client.end("a", "commit")
        prepared_answers.whole = [
            (503, {"Retry-After": "Mon, 01 Jan 2024 00:00:00 GMT"}),
            (503, {"Retry-After": "soon"}),
        ]
        prepared_answers.items = [DONE]
        await client.end("a", "commit")


async def test_ends_above_the_bound_are_told_and_left_to_check_back(
    prepared_answers: PreparedAnswers, caplog: pytest.LogCaptureFixture
) -> None:
    prepared_answers.items = [DONE]
    async with Halfway(prepared_answers.url, "shop", max_in_background=1) as client:
        for name in ("first", "second"):
            await client.end(name, "commit", confirm=False)
    assert [
        "left to check-back" in record.message for record in caplog.records if record.name.startswith("halfway")
    ] == [True]


OUTLIVES = "max_age_s 604800 could outlive the op topic's retention: at most 86400"


@pytest.mark.parametrize(
    "detail, errors, text",
    [
        (OUTLIVES, [("policy.max_age_s", OUTLIVES)], f"invalid_request: {OUTLIVES} (policy.max_age_s)"),
        ("group: too long", [("group", "too long")], "invalid_request: group: too long"),
        (
            "group: too long (and 1 more, in `errors`)",
            [("group", "too long"), ("id", "empty")],
            "invalid_request: group: too long (and 1 more, in `errors`); id: empty",
        ),
        ("wrong", [], "invalid_request: wrong"),
    ],
    ids=["without the field", "with the field", "two fields", "no field"],
)
def test_a_text_says_nothing_twice(detail: str, errors: list[tuple[str, str]], text: str) -> None:
    """A field and its error are added only if the detail does not have them; `errors` has all of them."""
    problem = {
        "status": 422,
        "error_code": "invalid_request",
        "detail": detail,
        "errors": [{"field": field, "detail": cause} for field, cause in errors],
    }
    error = error_of(problem)
    assert str(error) == text
    assert error.errors == dict(errors)


@pytest.mark.parametrize(
    "error",
    [error_of({"status": 404, "error_code": "unknown_group", "detail": "no group"}), UncommittedConnectionError()],
    ids=["refused", "without parameters"],
)
def test_an_error_can_be_handed_to_another_process(error: HalfwayError) -> None:
    """As `multiprocessing.Pool` does, which waits for ever for the result if it cannot read the error."""
    read = pickle.loads(pickle.dumps(error))  # noqa: S301 - its own
    assert (type(read), str(read), vars(read)) == (type(error), str(error), vars(error))


def test_a_client_cannot_be_handed_to_another_process() -> None:
    with pytest.raises(TypeError, match="open one there"):
        pickle.dumps(SyncHalfway("http://127.0.0.1:1", "shop"))
