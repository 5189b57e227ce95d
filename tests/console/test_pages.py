"""A long list: its first page, its middle and its end, in constant memory."""

import asyncio
import logging
import os
import time
from statistics import median

import aiohttp
import pytest
from playwright.async_api import Page, expect

from tests.support.brokers.fixtures import Kafka
from tests.support.console.heap import heap
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.rest_client import QUIET, Rest, message
from tests.support.coordinator.topics import Cluster
from tests.support.ids import new_id

TRANSACTIONS = int(os.environ.get("HALFWAY_TEST_CONSOLE_PAGED", "3000"))
OF_PAGE = 50
OF_BATCH = 500
PAGES = 20
"""The number of pages to turn at the beginning and in the middle."""
MOST_GROWTH_BYTES = 3 * 1024 * 1024
SHOWN = """(first) => new Promise((done) => {
  const look = () => document.querySelector("tbody a")?.textContent === first ? done() : requestAnimationFrame(look);
  look();
})"""
"""Returns in the frame in which a page is shown, which `expect` would detect later."""
log = logging.getLogger(__name__)


async def fill(rest: Rest, topic: str) -> None:
    """Prepare many transactions, four batches at a time."""
    numbers = iter(range(0, TRANSACTIONS, OF_BATCH))

    async def prepare_part() -> None:
        for begin in numbers:
            items = [
                {"group": "many", "id": new_id(), "messages": [message(topic, key="k", value="v")]}
                for _ in range(begin, begin + OF_BATCH)
            ]
            answers = (await rest.batch(prepare=items)).expect(200)["prepare"]
            assert {answer["status"] for answer in answers} == {201}

    await asyncio.gather(*(prepare_part() for _ in range(4)))


async def list_all(rest: Rest) -> tuple[list[str], dict[int, str]]:
    """Return all ids in the order of the list, and some cursors by the position at which they continue."""
    size = min(1000, TRANSACTIONS // 10)
    ids: list[str] = []
    cursors: dict[int, str] = {}
    cursor = ""
    while True:
        shown = (await rest.call("GET", f"/transactions?limit={size}{cursor}")).expect(200)
        ids += [one["id"] for one in shown["transactions"]]
        if shown["next"] is None:
            return ids, cursors
        cursors[len(ids)] = shown["next"]
        cursor = f"&cursor={shown['next']}"


@pytest.mark.timeout(1800)
async def test_any_page_of_many_is_shown_and_none_of_the_former_is_kept(
    page: Page, kafka: Kafka, coordinator: CoordinatorProcess
) -> None:
    topic = await Cluster(kafka.bootstrap_servers).make_topic("many")
    async with aiohttp.ClientSession() as session:
        rest = Rest(session, coordinator.url, coordinator.health_url)
        (await rest.put_group("many", topics=[topic], policy=QUIET)).expect(201)
        began = time.monotonic()
        await fill(rest, topic)
        log.info("%d prepared in %.1f s", TRANSACTIONS, time.monotonic() - began)
        ids, cursors = await list_all(rest)
    assert len(set(ids)) == TRANSACTIONS
    links = page.get_by_role("table").get_by_role("link")

    async def turn_pages(name: str, place: int, pages: int) -> None:
        """Open the page that starts at a position, and turn some pages."""
        cursor, number = (f"cursor={cursors[place]}", place // OF_PAGE + 1) if place else ("", 1)
        began = time.monotonic()
        await page.goto(f"{coordinator.url}/console/#/transactions?{cursor}&page={number}")
        await page.evaluate(SHOWN, ids[place])
        took = [time.monotonic() - began]
        await expect(links).to_have_text(ids[place : place + OF_PAGE])
        for turn in range(1, pages):
            began = time.monotonic()
            await page.get_by_role("link", name="Next page").click()
            await page.evaluate(SHOWN, ids[place + turn * OF_PAGE])
            took.append(time.monotonic() - began)
            await expect(page.get_by_text(f"Page {number + turn}", exact=True)).to_be_visible()
            await expect(links).to_have_text(ids[place + turn * OF_PAGE : place + (turn + 1) * OF_PAGE])
        log.info("%s: opened in %.3f s, turned in %.3f s (median)", name, took[0], median(took[1:]))

    await turn_pages("first", 0, 4)
    early, early_nodes = await heap(page)
    await turn_pages("first", 0, PAGES)
    middle, last = sorted(cursors)[len(cursors) // 2], max(cursors)
    await turn_pages("middle", middle, PAGES)
    late, late_nodes = await heap(page)
    log.info("heap %.0f, then %.0f KiB; nodes %d, then %d", early / 1024, late / 1024, early_nodes, late_nodes)
    assert late - early < MOST_GROWTH_BYTES
    assert late_nodes < early_nodes * 1.5
    await turn_pages("last", last, (TRANSACTIONS - last) // OF_PAGE)
    await expect(page.get_by_role("link", name="Next page")).to_have_count(0)
