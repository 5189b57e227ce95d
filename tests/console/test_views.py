"""Each view with much data, during a restart of the coordinator, and through each of several instances."""

from playwright.async_api import Page, expect

from halfway.embedded.broker import pick_port
from tests.console.conftest import NewPage
from tests.support.console.axe import violations
from tests.support.console.browser import NARROW
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.support.service.broker import Memory

MANY = 150
MESSAGES = 300
SHOWS = {
    "overview": "Nothing is parked",
    "transactions": named_id("r-1"),
    f"transactions/{named_id('r-1')}": "Prepared",
    "groups": "shop",
    "groups/shop": "First check after",
    "failures": "Every topic can be written.",
}


async def test_each_view_is_found_again_after_a_restart(new_page: NewPage) -> None:
    """In the meantime each view says that it is not connected."""
    pages: dict[str, Page] = {}
    async with RestWorld(port=pick_port()) as first:
        await first.put_shop()
        await first.prepared(id=named_id("r-1"))
        port = first.port
        for view, shown in SHOWS.items():
            page = pages[view] = await new_page()
            await page.goto(f"{first.url}/console/#/{view}")
            await expect(page.get_by_role("main")).to_contain_text(shown)
    for page in pages.values():
        await expect(page.get_by_role("alert").filter(has_text="Not connected")).to_be_visible()
    after = Memory(shards=2, beside=first.memory)
    async with RestWorld(memory=after, port=port):
        for view, page in pages.items():
            await expect(page.get_by_role("alert")).to_have_count(0)
            await expect(page.get_by_role("main")).to_contain_text(SHOWS[view])


async def test_views_with_much_to_show_stay_bounded_accessible_and_narrow(new_page: NewPage) -> None:
    async with RestWorld() as world:
        await world.put_shop()
        messages = [{"topic": "orders", "key": f"k-{number}", "value": "v" * 200} for number in range(MESSAGES)]
        await world.prepared(*messages, id=named_id("large"))
        activity = world.coordinator.statistics._activity
        for number in range(MANY):
            activity.note_refused_write(f"t-{number}", f"topic-{number}", "topic_unavailable", "it has no leader", 5)
            activity.note_refused_write(f"t-{number}", f"topic-{number}", "topic_unavailable", "try again later", 5)
            activity.skipped_record(f"topic-{number}", "wrong_key")
        page = await new_page(size=NARROW, dark=True)
        rows = page.get_by_role("table").locator("tbody tr")
        found = {}
        for view, count in (("failures", 300), (f"transactions/{named_id('large')}", MESSAGES), ("overview", None)):
            await page.goto(f"{world.url}/console/#/{view}")
            if view.startswith("transactions"):
                await page.get_by_role("button", name="Show the messages").click()
                await expect(page.get_by_role("button", name="Hide the messages")).to_be_visible()
            if count is not None:
                await expect(rows).to_have_count(count)
            else:
                await expect(page.get_by_text("more, in")).to_be_visible()
            wrong = await violations(page)
            if await page.evaluate("document.documentElement.scrollWidth") > NARROW[0]:
                wrong.append("it scrolls sideways")
            if wrong:
                found[view] = wrong
        assert found == {}
