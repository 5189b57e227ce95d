"""On a real broker, through the console only: an endpoint breaks, its transactions are parked, resumed and ended."""

import asyncio
import os
from collections.abc import Sequence

import aiohttp
import pytest
from aiohttp import web
from playwright.async_api import Page, expect

from tests.support.brokers.fixtures import Kafka
from tests.support.console.clicks import Clicks
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.rest_client import Rest, message
from tests.support.coordinator.topics import Cluster
from tests.support.ids import new_id

TRANSACTIONS = int(os.environ.get("HALFWAY_TEST_CONSOLE_TRANSACTIONS", "800"))
POLICY = {"first_check_after_s": 0.1, "check_interval_s": 0.1, "max_interval_s": 0.1, "max_checks": 1}
PAGE = "<html><body><h1>502 Bad Gateway</h1><script>document.title='taken'</script></body></html>"
PATIENCE_MS = 600_000
RATE = min(500, TRANSACTIONS // 4)


async def prepare(coordinator: CoordinatorProcess, endpoint: CheckEndpoint, topic: str, ids: Sequence[str]) -> None:
    """Prepare transactions of a group whose endpoint is broken."""
    endpoint.answer(lambda _: web.Response(status=502, text=PAGE, content_type="text/html"))
    async with aiohttp.ClientSession() as session:
        rest = Rest(session, coordinator.url, coordinator.health_url)
        (await rest.put_group("shop", topics=[topic], urls=[endpoint.url], policy=POLICY)).expect(201)
        for begin in range(0, len(ids), 500):
            items = [
                {"group": "shop", "id": own, "messages": [message(topic, key=own)]} for own in ids[begin : begin + 500]
            ]
            answers = (await rest.batch(prepare=items)).expect(200)["prepare"]
            assert {answer["status"] for answer in answers} == {201}


@pytest.mark.timeout(2400)
async def test_a_broken_endpoint_is_found_and_all_that_was_parked_comes_to_its_end(
    page: Page, kafka: Kafka, coordinator: CoordinatorProcess, endpoint: CheckEndpoint
) -> None:
    """Three clicks from the list of parked transactions to the evidence, and to the action that resumes all of them.

    The coordinator is killed in the middle of it.
    """
    topic = await Cluster(kafka.bootstrap_servers).make_topic("orders")
    ids = [new_id() for _ in range(TRANSACTIONS)]
    await prepare(coordinator, endpoint, topic, ids)

    # The overview shows how many are parked, and the endpoint's answer.
    everything = f"{TRANSACTIONS:,}"
    await page.goto(f"{coordinator.url}/console/")
    parked = page.locator(".tile", has=page.get_by_text("Parked", exact=True))
    await expect(parked.locator(".tile-value")).to_have_text(everything, timeout=PATIENCE_MS)
    item = page.get_by_role("listitem").filter(has_text=f"{everything} transactions of shop")
    await expect(item).to_contain_text("502")
    await parked.click()
    first = page.get_by_role("table").get_by_role("link").first
    await expect(first).to_be_visible()

    # The service is repaired. Three clicks lead from the list of parked transactions over the evidence to the action.
    endpoint.answer("commit")
    clicks = await Clicks.counted(page)
    await first.click()
    await expect(page.locator(".event").filter(has_text="Checked").first).to_be_visible()
    await expect(page.locator(".event").filter(has_text="Parked")).to_contain_text("status 502, not 200")
    await page.get_by_role("button", name="Resume all parked of shop…").click()
    await expect(page.get_by_label("Reason")).to_be_focused()
    await page.get_by_label("Reason").press_sequentially("the endpoint is mended")
    await page.get_by_label("At most").press("Control+a")
    await page.get_by_label("At most").press_sequentially(str(RATE))
    await page.get_by_role("button", name=f"Resume {everything}").click()
    action = page.get_by_role("region", name="Resume all parked of shop")
    await expect(action).to_contain_text(f"{RATE} of {everything}", timeout=PATIENCE_MS)
    coordinator.kill()
    await expect(action).to_contain_text("The coordinator does not answer.", timeout=PATIENCE_MS)
    await asyncio.to_thread(coordinator.start)
    # What a batch did whose answer was lost is not counted: it no longer matches.
    await expect(action.get_by_role("status").first).to_contain_text("done: ", timeout=PATIENCE_MS)
    await expect(action.get_by_role("status").first).to_contain_text(", 0 failed")
    assert clicks.count == 3

    # All transactions end, and the history of each shows how.
    await page.get_by_role("link", name="Overview").click()
    await expect(parked.locator(".tile-value")).to_have_text("0", timeout=PATIENCE_MS)
    pending = page.locator(".tile", has=page.get_by_text("Pending", exact=True)).locator(".tile-value")
    await expect(pending).to_have_text("0", timeout=PATIENCE_MS)
    await page.get_by_role("navigation", name="Views").get_by_role("link", name="Transactions").click()
    await page.get_by_label("State").select_option("committed")
    await page.get_by_role("table").get_by_role("link").first.click()
    history = page.locator(".history")
    for step in ("Prepared", "Parked", "Resumed", "the endpoint is mended", "Committed by check"):
        await expect(history).to_contain_text(step)
    places = page.get_by_role("table", name="Where each message is in Kafka")
    await expect(places.get_by_role("cell", name=topic)).to_be_visible()
    assert "taken" not in await page.title()
    records = await Cluster(kafka.bootstrap_servers).read(topic)
    assert sorted(record.transaction_id for record in records) == sorted(ids)
