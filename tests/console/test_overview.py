"""The overview: live figures, problems that need attention, unavailable shards, and constant memory."""

import re
from typing import Any

from playwright.async_api import Locator, Page, expect

from halfway.coordinator.records import HealthWarning
from halfway.embedded.broker import pick_port
from tests.support.console.heap import heap
from tests.support.console.shop import IMPATIENT, Shop
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.support.rest.guarded import Guarded
from tests.support.service.broker import Memory

POINTS = 600
ASK_AGAIN = """async (times) => {
  const { live, tryNow } = await import('/console/lib/live.js');
  for (let time = 0; time < times; time += 1) {
    for (const before = live.data.at; live.data.at === before; await new Promise((done) => setTimeout(done))) tryNow();
  }
}"""
"""Lets the page ask for its figures so many times, without its pauses."""
ANSWER_HERE = """(figures) => {
  const { fetch } = window;
  let minutes = 0;
  window.fetch = async (url, ...options) => {
    if (!String(url).includes('/v1/statistics')) return fetch(url, ...options);
    const at = new Date(Date.UTC(2026, 0, 1, 0, (minutes += 1))).toISOString();
    return Response.json({ ...figures, at, counted: { ...figures.counted, at } });
  };
}"""
"""Lets the page answer itself, a minute later each time: thousands of requests through the driver would cost more."""
MOST_GROWTH_BYTES = 3 * 1024 * 1024


def tile(page: Page, label: str) -> Locator:
    return page.locator(".tile", has=page.get_by_text(label, exact=True)).locator(".tile-value")


async def test_what_is_parked_needs_attention_with_its_evidence_and_is_resumed_there(
    page: Page, shop: Shop, endpoint: CheckEndpoint
) -> None:
    await shop.group(url=endpoint.url, policy=IMPATIENT)
    await shop.prepared(["at-1", "at-2"])
    for own in (shop.id("at-1"), shop.id("at-2")):
        await shop.rest.until(own, "parked")
    endpoint.answer("commit")
    await page.goto(shop.at())
    item = page.get_by_role("listitem").filter(has_text="2 transactions of shop")
    await expect(item).to_contain_text("parked")
    await item.get_by_role("button", name="Resume…").click()
    await page.get_by_label("Reason").fill("it answers again")
    await page.get_by_role("button", name="Resume 2").click()
    await expect(page.get_by_text("2 of 2", exact=True)).to_be_visible()
    await page.get_by_role("link", name="Overview").click()
    await expect(page.get_by_text("Nothing is parked")).to_be_visible()


async def test_several_instances_are_shown_with_their_shards(page: Page, instances: Guarded) -> None:
    """Each instance shows the figures of all of them."""
    for number in range(6):
        prepare = {"group": "shop", "id": named_id(f"i-{number}"), "messages": [{"topic": "orders", "value": "v"}]}
        assert (await instances.call("operator", "POST", "/v1/transactions", prepare)).status == 201
    for world in (instances.here, instances.there):
        await page.goto(f"{world.url}/console/")
        await page.get_by_label("Key", exact=True).fill(instances.tokens["operator"] or "")
        await page.get_by_role("button", name="Sign in").click()
        await expect(tile(page, "Pending")).to_have_text("6")
        await expect(page.get_by_role("table", name="Instances").locator("tbody tr")).to_have_count(2)
        await expect(page.get_by_text("serves this page")).to_have_count(1)
        await expect(page.locator(".shards li")).to_have_count(2)


async def test_a_shard_that_is_away_is_said_in_place_of_less_being_shown(page: Page) -> None:
    memory = Memory(shards=2, topics={"orders": 1, "coupons": 1}, owns={0})
    async with RestWorld(memory=memory) as world:
        await page.goto(f"{world.url}/console/")
        await expect(page.get_by_role("alert").filter(has_text="Shard 1 is not available.")).to_be_visible()
        await expect(page.locator(".shards li").nth(1)).to_contain_text("not available")
        await page.get_by_role("link", name="Transactions").click()
        await expect(page.get_by_role("alert").filter(has_text="shard_unavailable")).to_be_visible()
        await expect(page.get_by_text("No transactions.")).to_have_count(0)


async def test_what_is_unsafe_is_said_first_and_in_every_view(page: Page) -> None:
    """Also while nothing is parked and every endpoint is healthy: the overview does not say that all is well."""
    async with RestWorld() as world:
        await page.goto(f"{world.url}/console/")
        await expect(page.get_by_text("Nothing is parked")).to_be_visible()
        unsafe = HealthWarning(check="topics", detail="topic 'half' is compacted by time")
        world.coordinator.statistics.warnings = lambda: [unsafe]
        alert = page.get_by_role("alert").filter(has_text="The coordinator is unsafe.")
        await expect(alert).to_contain_text(unsafe.detail)
        await expect(page.get_by_role("listitem").filter(has_text=unsafe.detail)).to_contain_text("unsafe")
        await expect(page.get_by_text("Nothing is parked")).to_have_count(0)
        await page.get_by_role("link", name="Failures").first.click()
        await expect(alert).to_be_visible()
        world.coordinator.statistics.warnings = tuple
        await expect(page.get_by_role("alert")).to_have_count(0)


async def test_a_coordinator_that_restarts_is_told_and_found_again(page: Page) -> None:
    """In the meantime the data is marked as stale; afterwards it is loaded again automatically."""
    async with RestWorld(port=pick_port()) as first:
        await first.put_shop()
        await first.prepared(id=named_id("r-1"))
        await first.prepared(id=named_id("ended"))
        await first.call("POST", f"/v1/transactions/{named_id('ended')}/end", {"outcome": "commit"})
        port = first.port
        await page.goto(f"{first.url}/console/#/transactions")
        await expect(page.get_by_role("link", name=named_id("r-1"))).to_be_visible()
        await page.get_by_role("link", name="Overview").click()
        await expect(tile(page, "Pending")).to_have_text("1")
    await expect(page.get_by_role("alert").filter(has_text="Figures are stale")).to_be_visible()
    await expect(page.locator(".tiles.stale")).to_be_visible()
    await page.get_by_role("link", name="Transactions").click()
    await expect(page.get_by_role("alert").filter(has_text="The console retries automatically")).to_be_visible()
    after = Memory(shards=2, beside=first.memory)
    async with RestWorld(memory=after, port=port) as second:
        await expect(page.get_by_role("link", name=named_id("r-1"))).to_be_visible()
        await second.prepared(id=named_id("r-2"))
        await page.get_by_role("link", name="Overview").click()
        await expect(tile(page, "Pending")).to_have_text("2")
        await expect(page.get_by_role("table", name="Ends by outcome")).to_contain_text(re.compile("commit.1"))
        await expect(page.get_by_text("Through every restart")).to_contain_text("Committed by producer 1.")
        await expect(page.get_by_role("alert")).to_have_count(0)


async def test_it_takes_no_more_memory_however_long_it_stays_open(page: Page, shop: Shop) -> None:
    """With some thousand answers, as in hours."""
    await shop.group("shop")
    await shop.prepared(["m-1"])
    figures: dict[str, Any] = (await shop.rest.call("GET", "/statistics")).expect(200)
    await page.goto(shop.at())
    await expect(tile(page, "Pending")).to_have_text("1")
    await page.evaluate(ANSWER_HERE, figures)
    await page.evaluate(ASK_AGAIN, POINTS)
    early, early_nodes = await heap(page)
    await page.evaluate(ASK_AGAIN, 2 * POINTS)
    late, late_nodes = await heap(page)
    points = await page.evaluate("import('/console/lib/live.js').then(({live}) => [live.ring.count, live.ring.length])")
    assert points == [POINTS, POINTS]
    assert late - early < MOST_GROWTH_BYTES
    assert late_nodes < early_nodes * 1.5
