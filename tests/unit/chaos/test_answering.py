"""The check endpoints of the chaos harness answer what is signed by its group's secret, and report what is not."""

import json
from base64 import b64encode
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from standardwebhooks.webhooks import Webhook

from checker.history import HistoryWriter
from tests.chaos.answering import PLAIN_FROM, CheckEndpoints
from tests.chaos.decisions import Decisions

SECRET, ANOTHER = ("whsec_" + b64encode(bytes([number]) * 32).decode() for number in (1, 2))
BODY = json.dumps({"id": "o-42", "group": "shop", "attempt": PLAIN_FROM, "nonce": "n", "messages": [{"key": None}]})


@pytest.fixture
async def endpoints(tmp_path: Path) -> AsyncIterator[CheckEndpoints]:
    producers = SimpleNamespace(undecided=set())
    decisions = Decisions(tmp_path / "decisions.db")
    with HistoryWriter(tmp_path / "history.jsonl") as history:
        made = CheckEndpoints(decisions, cast("Any", producers), history, 1)
        await made.start()
        yield made
        await made.stop()
    decisions.close()


def signed(secret: str) -> dict[str, str]:
    now = datetime.now(UTC)
    signature = Webhook(secret).sign("o-42:1", now, BODY)
    return {"webhook-id": "o-42:1", "webhook-timestamp": str(int(now.timestamp())), "webhook-signature": signature}


async def post(endpoints: CheckEndpoints, headers: dict[str, str]) -> int:
    async with aiohttp.ClientSession() as session, session.post(endpoints.url, data=BODY, headers=headers) as answer:
        return answer.status


async def test_what_the_groups_secret_has_signed_is_answered_once(endpoints: CheckEndpoints) -> None:
    """A copy of it is reported."""
    endpoints.trust("shop", [SECRET])
    headers = signed(SECRET)
    assert await post(endpoints, headers) == 200
    assert endpoints.forged == []
    assert await post(endpoints, headers) == 401
    assert len(endpoints.forged) == 1


@pytest.mark.parametrize("headers", [{}, signed(ANOTHER)], ids=["not signed", "signed by another"])
async def test_a_check_that_is_not_signed_by_its_group_is_reported(
    endpoints: CheckEndpoints, headers: dict[str, str]
) -> None:
    assert await post(endpoints, headers) == 200, "no secret is known yet"
    endpoints.trust("shop", [SECRET])
    assert await post(endpoints, headers) == 401
    [forged] = endpoints.forged
    assert forged.startswith(f"o-42, attempt {PLAIN_FROM}: ")
