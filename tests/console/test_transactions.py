"""The list of transactions: filters in the URL, pages, and one transaction."""

from aiohttp import web
from playwright.async_api import Page, expect

from tests.support.console.shop import IMPATIENT, Shop
from tests.support.coordinator.endpoints import CheckEndpoint


async def test_with_no_data_each_view_says_so(page: Page, shop: Shop) -> None:
    await page.goto(shop.at("transactions"))
    await expect(page.get_by_text("No transactions.")).to_be_visible()
    await page.goto(shop.at("groups"))
    await expect(page.get_by_text("No group yet.")).to_be_visible()
    await page.goto(shop.at("failures"))
    for nothing in (
        "Every topic can be written.",
        "No end is refused.",
        "Nothing is in quarantine.",
        "Nothing was skipped.",
    ):
        await expect(page.get_by_text(nothing)).to_be_visible()
    await page.goto(shop.at("overview"))
    await expect(page.get_by_text("Nothing is parked")).to_be_visible()


async def test_filters_are_in_the_address_and_hold_when_it_is_opened_again(page: Page, shop: Shop) -> None:
    await shop.group("shop")
    await shop.group("mail")
    await shop.prepared(["s-1", "s-2"], group="shop")
    await shop.prepared(["t-1"], group="mail")
    await shop.rest.commit(shop.id("s-2"))
    await page.goto(shop.at("transactions"))
    links = page.get_by_role("table").get_by_role("link")
    await expect(links).to_have_text([shop.id("s-1"), shop.id("s-2"), shop.id("t-1")])
    await page.get_by_label("Group").fill("shop")
    await page.keyboard.press("Enter")
    await expect(links).to_have_text([shop.id("s-1"), shop.id("s-2")])
    await page.get_by_label("State").select_option("committed")
    await expect(links).to_have_text([shop.id("s-2")])
    assert page.url.endswith("#/transactions?group=shop&state=committed")
    await page.reload()
    await expect(links).to_have_text([shop.id("s-2")])
    await expect(page.get_by_label("Group")).to_have_value("shop")
    await page.go_back()
    await expect(links).to_have_text([shop.id("s-1"), shop.id("s-2")])
    await page.get_by_role("link", name="Clear").click()
    await expect(links).to_have_count(3)


async def test_groups_are_paged_and_one_without_live_figures_has_its_own(page: Page, shop: Shop) -> None:
    """Live figures include the 100 groups with the most parked and pending transactions; this group has the fewest."""
    for number in range(120):
        await shop.group(f"g-{number:03}")
    rows = page.get_by_role("table", name="Groups").locator("tbody tr")
    await page.goto(shop.at("groups"))
    await expect(rows).to_have_count(100)
    await page.get_by_role("link", name="Next page").click()
    await expect(rows).to_have_count(20)
    await expect(page.get_by_text("live figures for the 100 groups")).to_be_visible()
    await page.get_by_role("link", name="g-119").click()
    await expect(page.locator(".facts > div").filter(has_text="Circuit breaker")).to_contain_text("closed")
    await page.go_back()
    await page.get_by_role("button", name="Previous page").click()
    await expect(rows).to_have_count(100)


async def test_a_transaction_is_found_by_keyboard_alone(page: Page, shop: Shop) -> None:
    """From the address bar to a transaction, always with a visible focus."""
    await shop.group("shop")
    await shop.prepared(["k-1"])
    await page.goto(shop.at("transactions"))
    await expect(page.get_by_role("link", name=shop.id("k-1"))).to_be_visible()
    for _ in range(40):
        await page.keyboard.press("Tab")
        if await page.evaluate("document.activeElement.textContent") == shop.id("k-1"):
            break
        outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline not in ("none", ""), await page.evaluate("document.activeElement.outerHTML")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name=shop.id("k-1"))).to_be_focused()


async def test_messages_are_hidden_until_asked_for(page: Page, shop: Shop) -> None:
    await shop.group("shop")
    await shop.prepared(
        ["h-1"], value={"type": "JSON", "data": {"total": 42}}, headers=[{"name": "trace", "value": "t-9"}]
    )
    await page.goto(shop.at(f"transactions/{shop.id('h-1')}"))
    await page.get_by_role("button", name="Show the messages").click()
    await expect(page.locator(".payload")).to_have_text('{\n  "total": 42\n}')
    await expect(page.get_by_text("t-9")).to_be_visible()
    await page.get_by_role("button", name="Hide the messages").click()
    await expect(page.get_by_text("t-9")).to_have_count(0)


async def test_a_check_on_demand_is_accepted_and_then_its_answer_decides(
    page: Page, shop: Shop, endpoint: CheckEndpoint
) -> None:
    await shop.group(url=endpoint.url)
    await shop.prepared(["c-1"])
    endpoint.answer("commit")
    await page.goto(shop.at(f"transactions/{shop.id('c-1')}"))
    await expect(page.locator(".heading").get_by_text("prepared")).to_be_visible()
    await page.get_by_role("button", name="Check now").click()
    await expect(page.locator(".heading").get_by_text("committed")).to_be_visible()
    await expect(page.get_by_text("by check").first).to_be_visible()
    await expect(page.get_by_role("button", name="Check now")).to_have_count(0)


async def test_the_history_tells_each_step_and_where_the_messages_are(
    page: Page, shop: Shop, endpoint: CheckEndpoint
) -> None:
    """Checks, why it was parked, what it was resumed for, and what ended it."""
    endpoint.answer(lambda _: web.Response(status=502, text="upstream is down", content_type="text/plain"))
    await shop.group(url=endpoint.url, policy=IMPATIENT)
    await shop.prepared(["y-1"])
    await shop.rest.until(shop.id("y-1"), "parked")
    await page.goto(shop.at(f"transactions/{shop.id('y-1')}"))
    events = page.locator(".event")
    await expect(events.filter(has_text="Checked").first).to_contain_text("no. 1")
    await expect(events.last).to_contain_text("Parked")
    await expect(events.last).to_contain_text("status 502, not 200")
    last_check = page.locator(".facts > div").filter(has_text="Last check").get_by_role("time")
    await expect(last_check).to_be_visible()
    endpoint.answer("commit")
    await page.get_by_role("button", name="Resume…").click()
    await page.get_by_label("Reason").fill("it is up again")
    await page.get_by_role("button", name="Resume 1").click()
    await expect(events.last).to_contain_text("Committed by check")
    await expect(last_check).to_be_visible()
    await expect(events.filter(has_text="Resumed")).to_contain_text("it is up again")
    places = page.get_by_role("table", name="Where each message is in Kafka").locator("tbody tr")
    await expect(places).to_contain_text(shop.topic)
    await expect(places.get_by_role("cell").nth(3)).to_have_text("0")


async def test_what_is_parked_says_why(page: Page, shop: Shop, endpoint: CheckEndpoint) -> None:
    await shop.group(url=endpoint.url, policy=IMPATIENT)
    await shop.prepared(["w-1"])
    await shop.rest.until(shop.id("w-1"), "parked")
    await page.goto(shop.at("transactions?state=parked"))
    await expect(page.get_by_role("row", name=shop.id("w-1"))).to_contain_text("checks")
    await page.get_by_role("link", name=shop.id("w-1")).click()
    await expect(page.get_by_text("Why parked")).to_be_visible()


async def test_an_unknown_id_is_told_so(page: Page, shop: Shop) -> None:
    await page.goto(shop.at("transactions/never-was"))
    await expect(page.get_by_text("No such transaction.")).to_be_visible()
    await page.goto(shop.at("nowhere"))
    await expect(page.get_by_text("There is no such view.")).to_be_visible()
