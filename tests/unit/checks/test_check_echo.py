"""The check endpoint of `halfway dev --check-echo`, called by the coordinator and by wrong requests."""

from collections.abc import Iterator

import aiohttp
import pytest

from halfway.app.dev import CheckEcho
from halfway.protocol.transactions import Outcome
from tests.unit.checks.conftest import Ask


@pytest.fixture(scope="module")
def echo() -> Iterator[CheckEcho]:
    """Return an endpoint that answers `commit`; to close it takes half a second."""
    with CheckEcho("commit", 0) as echo:
        yield echo


@pytest.mark.parametrize("outcome", Outcome)
async def test_every_check_gets_the_outcome(ask: Ask, outcome: Outcome) -> None:
    """Through the coordinator's own caller, which accepts only verdicts, over one connection."""
    with CheckEcho(outcome.value, 0) as echo:
        for _ in range(3):
            assert (await ask(echo.url)).outcome == outcome


async def test_the_nonce_of_a_question_is_given_back(echo: CheckEcho) -> None:
    """It binds the answer to its check."""
    async with aiohttp.ClientSession() as session, session.post(echo.url, json={"id": "t", "nonce": "n-1"}) as answer:
        assert await answer.json() == {"outcome": "commit", "nonce": "n-1"}


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"[" * 100_000, b"nothing"])
async def test_what_is_no_question_is_refused(echo: CheckEcho, body: bytes) -> None:
    """And the next check is answered."""
    async with aiohttp.ClientSession() as session:
        async with session.post(echo.url, data=body) as answer:
            assert answer.status == 400
        async with session.post(echo.url, json={"id": "t"}) as answer:
            assert await answer.json() == {"outcome": "commit"}
