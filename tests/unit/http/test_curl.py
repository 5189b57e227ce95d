"""The curl calls of the pages are answered as these say, and docs/api.md has every operation."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from halfway.client import answer_check
from tests.support.rest.client import RestWorld
from tests.support.waiting import GENEROUS_S

ROOT = Path(__file__).parents[3]
PAGES = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/api.md")]
LINE = re.compile(r"^\$ (curl .*?)(?:   # (\d{3}).*)?$", re.MULTILINE)


def calls(page: str) -> Iterator[tuple[str, str, dict[str, str], str | None, int]]:
    """Yield the method, address, headers, body and status of each line, which must have no other options."""
    for line, status in LINE.findall(page):
        _, *words = shlex.split(line)
        method, address, headers, body = "GET", "", {}, None
        while words:
            match words.pop(0):
                case "-X":
                    method = words.pop(0)
                case "--json":
                    body, headers["content-type"] = words.pop(0), "application/json"
                    method = "POST" if method == "GET" else method
                case address if not address.startswith("-"):
                    pass
                case other:
                    raise AssertionError(other)
        yield method, address, headers, body, int(status or 0)


@pytest.mark.parametrize("page", PAGES, ids=["README", "api"])
async def test_every_call_is_answered_as_the_page_says(page: str) -> None:
    asked, made = set(), ""
    async with RestWorld() as world, aiohttp.ClientSession() as session:
        for method, address, headers, body, status in calls(page):
            if address.startswith("localhost:9000"):
                continue
            url = address.replace("localhost:8080", world.url).replace("$ID", made)
            data = body and body.replace("$ID", made)
            async with session.request(method, url, data=data, headers=headers) as answer:
                assert answer.status == status or (not status and answer.ok), (method, address, await answer.text())
                made = (await answer.json())["id"] if address.endswith("/v1/transactions") else made
            path = re.sub(r"\?.*|localhost:8080", "", address)
            asked.add((method, re.sub(r"/(\$ID|shop|batch-jobs|3kT9mQ2xV7aB)(?=/|$)", "/{}", path)))
        described = await (await session.get(f"{world.url}/openapi.json")).json()
    there = {
        (method.upper(), re.sub(r"\{\w+\}", "{}", path))
        for path, operations in described["paths"].items()
        for method in operations
        if method in {"get", "put", "patch", "post", "delete"}
    }
    assert page == PAGES[0] or there - asked == set()


async def test_the_question_is_one_that_an_endpoint_answers() -> None:
    (body,) = [body for _, address, _, body, _ in calls(PAGES[1]) if address.startswith("localhost:9000")]
    assert body is not None
    answer = await answer_check(body.encode(), lambda _: "commit", within_s=GENEROUS_S)
    assert answer == (200, b'{"outcome": "commit", "nonce": "n-1"}')
