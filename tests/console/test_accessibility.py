"""WCAG AA with axe, in both themes, and at the width of a phone."""

import pytest
from playwright.async_api import Page, expect

from tests.console.conftest import NewPage
from tests.console.test_bulk import answer_items
from tests.support.console.axe import violations
from tests.support.console.browser import NARROW, WIDE
from tests.support.console.shop import IMPATIENT, Shop
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.rest.guarded import Guarded

LONG = "a-very-long-id-without-a-break-" * 4


async def _fill(shop: Shop, endpoint: CheckEndpoint) -> None:
    """Create data of every kind: prepared, parked, ended, broken endpoints, long names."""
    await shop.group(url=endpoint.url, policy=IMPATIENT)
    await shop.group("mail")
    await shop.group("warehouse-" * 9)
    await shop.prepared(["p-1", "p-2"])
    await shop.prepared(["q-1", "q-2"], group="mail", key="x" * 300, value="y" * 3000)
    await shop.rest.until(shop.id("p-1"), "parked")
    await shop.rest.end(shop.id("q-2"), "rollback", remark="no stock " * 40)


async def _until_loaded(page: Page) -> None:
    await expect(page.get_by_role("heading", level=1)).to_be_visible()
    await expect(page.locator(".loading")).to_have_count(0)


VIEWS = [
    "overview",
    "transactions",
    "transactions?state=parked",
    "transactions/p-1",
    "transactions/q-1",
    "groups",
    "groups/shop",
    "failures",
    "nowhere",
]


# Colours depend on the theme alone, and places on the width alone.
@pytest.mark.parametrize("size, dark", [(WIDE, False), (NARROW, True)], ids=["wide and light", "narrow and dark"])
async def test_each_view_is_accessible_and_fits(
    new_page: NewPage, shop: Shop, endpoint: CheckEndpoint, size: tuple[int, int], dark: bool
) -> None:
    await _fill(shop, endpoint)
    page = await new_page(size=size, dark=dark)
    found = {}
    for view in VIEWS:
        kind, _, name = view.partition("/")
        await page.goto(shop.at(f"{kind}/{shop.id(name)}" if kind == "transactions" and name else view))
        await _until_loaded(page)
        if view.startswith("transactions/"):
            await page.get_by_role("button", name="Show the messages").click()
            await expect(page.get_by_role("button", name="Hide the messages")).to_be_visible()
        wrong = await violations(page)
        if await page.evaluate("document.documentElement.scrollWidth") > size[0]:
            wrong.append("it scrolls sideways")
        if wrong:
            found[view] = wrong
    await page.goto(shop.at("transactions?state=parked"))
    await page.get_by_role("button", name="Resume all…").click()
    await expect(page.get_by_role("dialog")).to_contain_text("match")
    if wrong := await violations(page):
        found["dialog"] = wrong
    problem = {"error_code": "message_too_large", "detail": f"{LONG} is too large, " * 9}
    await page.route("**/v1/batch", lambda route: answer_items(route, {"status": 413, "problem": problem}))
    await page.get_by_label("Reason").fill("look " * 50)
    await page.get_by_role("dialog").locator("button[type=submit]").click()
    await expect(page.get_by_role("table", name="Transactions that failed")).to_be_visible()
    if wrong := await violations(page):
        found["bulk action"] = wrong
    if await page.evaluate("document.documentElement.scrollWidth") > size[0]:
        found["bulk action"] = ["it scrolls sideways"]
    assert found == {}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_the_login_is_accessible(new_page: NewPage, instances: Guarded, dark: bool) -> None:
    page = await new_page(size=NARROW, dark=dark)
    await page.goto(f"{instances.here.url}/console/")
    await page.get_by_label("Key", exact=True).fill("hw_o_wrong")
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("alert")).to_be_visible()
    assert await violations(page) == []


async def test_stale_figures_are_still_readable(new_page: NewPage, shop: Shop) -> None:
    page = await new_page()
    await page.goto(shop.at())
    await _until_loaded(page)
    await page.route("**/v1/statistics", lambda route: route.abort())
    await page.evaluate("import('/console/lib/live.js').then((module) => module.start())")
    await expect(page.get_by_role("alert")).to_contain_text("Not connected")
    assert await violations(page) == []


async def test_a_theme_that_is_chosen_holds(new_page: NewPage, shop: Shop) -> None:
    page = await new_page()
    await page.goto(shop.at())
    button = page.get_by_role("button", name="Theme")
    await expect(button).to_have_text("Theme: auto")
    await button.click()
    await button.click()
    await expect(button).to_have_text("Theme: dark")
    await page.reload()
    await expect(page.get_by_role("button", name="Theme")).to_have_text("Theme: dark")
    assert await page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"
