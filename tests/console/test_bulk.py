"""Manual actions: a preview, a reason, a bulk action with progress, a stop, and what failed."""

import asyncio
import json
from collections.abc import Mapping

import pytest
from playwright.async_api import Locator, Page, Request, Route, expect

from tests.support.console.shop import IMPATIENT, Shop
from tests.support.coordinator.endpoints import CheckEndpoint


async def begin(page: Page, reason: str = "endpoint mended", *, rate: int | None = None) -> None:
    """Enter a reason in the open dialog, and press its button."""
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Reason").fill(reason)
    if rate is not None:
        await dialog.get_by_label("At most").fill(str(rate))
    await dialog.locator("button[type=submit]").click()


def action(page: Page) -> Locator:
    """Return the region that shows the bulk action."""
    return page.locator("section", has=page.locator("#bulk-title"))


async def answer_items(route: Route, item: Mapping[str, object]) -> None:
    """Answer each item of a batch in the same way."""
    sent = route.request.post_data_json or {}
    answers = {name: [item for _ in sent.get(name, [])] for name in ("prepare", "end", "check", "resume")}
    await route.fulfill(status=200, content_type="application/json", body=json.dumps(answers))


async def test_a_preview_says_how_many_and_which_and_nothing_begins_without_a_reason(page: Page, shop: Shop) -> None:
    await shop.group("shop")
    await shop.group("mail")
    await shop.prepared([f"v-{number}" for number in range(12)])
    await shop.prepared(["other-1"], group="mail")
    await page.goto(shop.at("transactions?group=shop&state=prepared"))
    await page.get_by_role("button", name="Roll back all…").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("12 transactions match")
    await expect(dialog.get_by_role("listitem")).to_have_count(5)
    await expect(dialog).not_to_contain_text(shop.id("other-1"))
    await expect(dialog).to_contain_text("final")
    submit = dialog.get_by_role("button", name="Roll back 12")
    await expect(submit).to_be_disabled()
    await dialog.get_by_label("Reason").fill("   ")
    await expect(submit).to_be_disabled()
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)
    await expect(action(page)).to_have_count(0)


async def test_selected_rows_alone_are_resumed_and_what_became_of_them_is_said(
    page: Page, shop: Shop, endpoint: CheckEndpoint
) -> None:
    """The list is fresh afterwards, without a click."""
    await shop.group(url=endpoint.url, policy=IMPATIENT)
    await shop.prepared(["se-1", "se-2", "se-3"])
    for name in ("se-1", "se-2", "se-3"):
        await shop.rest.until(shop.id(name), "parked")
    endpoint.answer("commit")
    await page.goto(shop.at("transactions?state=parked"))
    for name in ("se-1", "se-3"):
        await page.get_by_label(f"Select {shop.id(name)}").check()
    await page.get_by_role("button", name="Resume 2 selected…").click()
    await begin(page)
    await expect(action(page)).to_contain_text("2 of 2")
    await expect(action(page)).to_contain_text("2 committed")
    await expect(page.get_by_role("table").get_by_role("link")).to_have_text([shop.id("se-2")])
    assert (await shop.rest.show(shop.id("se-2")))["state"] == "parked"


@pytest.mark.parametrize("answer, became", [("commit", "2 committed"), ("unknown", "2 parked again")])
async def test_what_became_of_what_was_resumed_counts_nothing_else(
    page: Page, shop: Shop, endpoint: CheckEndpoint, answer: str, became: str
) -> None:
    """The filter also finds what was never parked, and what is parked later."""
    await shop.group(url=endpoint.url, policy=IMPATIENT)
    await shop.prepared(["nb-1", "nb-2"])
    for name in ("nb-1", "nb-2"):
        await shop.rest.until(shop.id(name), "parked")
    await shop.prepared(["nb-3"])
    await shop.rest.commit(shop.id("nb-3"))
    endpoint.answer(answer)
    await page.goto(shop.at("transactions?state=parked&group=shop"))
    await page.get_by_role("button", name="Resume all…").click()
    await begin(page)
    await expect(action(page)).to_contain_text(f"Since then: {became}.")
    await shop.prepared(["nb-4"])
    await shop.rest.commit(shop.id("nb-4"))
    await expect(action(page)).to_contain_text(f"Since then: {became}.")


async def test_all_rows_of_a_page_are_selected_at_once(page: Page, shop: Shop) -> None:
    """With the keyboard too. What has ended is not among them."""
    await shop.group("shop")
    await shop.prepared(["pa-1", "pa-2", "pa-3"])
    await shop.rest.commit(shop.id("pa-2"))
    await page.goto(shop.at("transactions"))
    await page.get_by_label("Select all 2 on this page").focus()
    await page.keyboard.press("Space")
    await expect(page.get_by_role("button", name="Commit 2 selected…")).to_be_visible()
    await page.get_by_label(f"Select {shop.id('pa-1')}").uncheck()
    await expect(page.get_by_role("button", name="Commit 1 selected…")).to_be_visible()
    await page.get_by_label("Select all 2 on this page").check()
    await page.get_by_label("Select all 2 on this page").uncheck()
    await expect(page.get_by_role("button", name="Commit all…")).to_be_visible()


@pytest.mark.parametrize("ends", ["before the dialog", "during the dialog"])
async def test_an_action_on_selected_rows_never_comes_to_be_one_on_all(page: Page, shop: Shop, ends: str) -> None:
    """Although all that were selected have ended meanwhile, and have left the list."""
    await shop.group("shop")
    await shop.prepared(["di-1", "di-2"])
    await page.goto(shop.at("transactions?state=prepared"))
    await page.get_by_label(f"Select {shop.id('di-1')}").check()
    button = page.get_by_role("button", name="Roll back 1 selected…")
    if ends == "during the dialog":
        await button.click()
    await shop.rest.commit(shop.id("di-1"))
    await expect(page.locator("table a")).to_have_text([shop.id("di-2")])
    if ends == "before the dialog":
        await button.click()
    await expect(page.get_by_role("dialog")).to_contain_text("Roll back 1 selected")
    await begin(page)
    await expect(action(page).locator("[role=status]").first).to_have_text("done: 1 of 1, 0 failed")
    assert (await shop.rest.show(shop.id("di-2")))["state"] == "prepared"


@pytest.mark.parametrize("name, state", [("Commit", "committed"), ("Roll back", "rolled_back")])
async def test_all_that_a_filter_finds_are_ended_with_the_reason_as_their_remark(
    page: Page, shop: Shop, name: str, state: str
) -> None:
    """It goes on while other views are opened, and says so to a screen reader too."""
    await shop.group("shop")
    await shop.prepared([f"j-{number}" for number in range(7)])
    await shop.group("mail")
    await shop.prepared(["not-1"], group="mail")
    seen = asyncio.Event()

    async def hold(route: Route) -> None:
        await seen.wait()
        await route.continue_()

    await page.route("**/v1/batch", hold)
    await page.goto(shop.at("transactions?group=shop"))
    await page.get_by_role("button", name=f"{name} all…").click()
    await begin(page, "decided by hand", rate=5)
    await expect(page.locator("#bulk-title")).to_be_focused()
    await page.get_by_role("link", name="Groups").first.click()
    await expect(action(page).locator("[role=status]").first).to_contain_text("running")
    seen.set()
    await expect(action(page)).to_contain_text("7 of 7")
    await expect(action(page).locator("[role=status]").first).to_have_text("done: 7 of 7, 0 failed")
    shown = await shop.rest.show(shop.id("j-3"))
    assert (shown["state"], shown["cause"], shown["remark"]) == (state, "operator", "decided by hand")
    assert (await shop.rest.show(shop.id("not-1")))["state"] == "prepared"
    await page.get_by_role("button", name="Close").click()
    await expect(action(page)).to_have_count(0)


async def test_one_transaction_is_ended_by_itself_and_shown_at_once(page: Page, shop: Shop) -> None:
    """If it cannot be done, the dialog says why."""
    await shop.group("shop")
    await shop.prepared(["one-1", "one-2"])
    await page.goto(shop.at(f"transactions/{shop.id('one-1')}"))
    await page.get_by_role("button", name="Commit…").click()
    await begin(page)
    await expect(page.locator(".heading").get_by_text("committed")).to_be_visible()
    assert (await shop.rest.show(shop.id("one-1")))["remark"] == "endpoint mended"
    assert (await shop.rest.show(shop.id("one-2")))["state"] == "prepared"
    await page.goto(shop.at(f"transactions/{shop.id('one-2')}"))
    await page.get_by_role("button", name="Roll back…").click()
    await shop.rest.commit(shop.id("one-2"))
    await begin(page)
    await expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("already_ended")


async def test_it_is_stopped_with_the_keyboard_and_goes_on_with_the_rest(page: Page, shop: Shop) -> None:
    """Nothing is sent twice."""
    sent: list[str] = []

    def note(request: Request) -> None:
        if request.url.endswith("/v1/batch"):
            sent.extend(item["id"] for item in (request.post_data_json or {})["end"])

    page.on("request", note)
    await shop.group("shop")
    ids = [f"st-{number}" for number in range(4)]
    await shop.prepared(ids)
    await page.goto(shop.at("transactions?state=prepared"))
    await page.get_by_role("button", name="Roll back all…").click()
    await begin(page, rate=1)
    await expect(action(page)).to_contain_text("1 of 4")
    await expect(page.locator("#bulk-title")).to_be_focused()
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(action(page)).to_contain_text("The rest is unchanged")
    assert (await shop.rest.show(shop.id("st-3")))["state"] == "prepared"
    await action(page).get_by_role("button", name="Go on with the rest").click()
    await expect(action(page).locator("[role=status]").first).to_contain_text("done: ")
    assert sent == [shop.id(name) for name in ids]
    assert (await shop.rest.show(shop.id("st-3")))["state"] == "rolled_back"


async def test_a_page_with_an_action_asks_before_it_is_closed(page: Page, shop: Shop) -> None:
    asked: list[str] = []
    await shop.group("shop")
    await shop.prepared([f"cl-{number}" for number in range(40)])
    await page.goto(shop.at("transactions?state=prepared"))
    await page.get_by_role("button", name="Roll back all…").click()
    await begin(page, rate=1)
    await expect(action(page)).to_contain_text("1 of 40")

    async def leave(dialog: object) -> None:
        asked.append(dialog.type)  # type: ignore[attr-defined]
        await dialog.accept()  # type: ignore[attr-defined]

    page.on("dialog", leave)
    await page.reload()
    await expect(page.get_by_role("heading", level=1)).to_be_visible()
    await expect(action(page)).to_have_count(0)
    assert asked == ["beforeunload"]


async def test_a_batch_whose_answer_is_lost_is_not_sent_again(page: Page, shop: Shop) -> None:
    """What it did no longer matches, so only the rest is sent, and the page says that it waits."""
    sent: list[str] = []
    await shop.group("shop")
    ids = [f"l-{number}" for number in range(7)]
    await shop.prepared(ids)

    async def lose(route: Route) -> None:
        is_first = not sent
        sent.extend(item["id"] for item in (route.request.post_data_json or {})["end"])
        if is_first:
            await route.fetch()
            await route.abort()
        else:
            await route.continue_()

    await page.route("**/v1/batch", lose)
    await page.goto(shop.at("transactions?group=shop"))
    await page.get_by_role("button", name="Commit all…").click()
    await begin(page, rate=4)
    await expect(action(page)).to_contain_text("3 of 3")
    await expect(action(page).locator("[role=status]").first).to_contain_text("done: ")
    assert sent == [shop.id(name) for name in ids]


async def test_the_last_hundred_that_failed_are_named_and_the_others_are_done(page: Page, shop: Shop) -> None:
    """However many fail, the page keeps a hundred. What somebody else has ended meanwhile is no failure."""
    problem = {"status": 503, "error_code": "topic_unavailable", "detail": "create the topic, then send it again"}
    await shop.group("shop")
    await shop.prepared([f"f-{number:03}" for number in range(130)])
    await page.route("**/v1/batch", lambda route: answer_items(route, {"status": 503, "problem": problem}))
    await page.goto(shop.at("transactions?group=shop"))
    await page.get_by_role("button", name="Commit all…").click()
    await begin(page, rate=500)
    await expect(action(page).locator("[role=status]").first).to_have_text("done: 130 of 130, 130 failed")
    rows = action(page).get_by_role("table").locator("tbody tr")
    await expect(rows).to_have_count(100)
    await expect(rows.last).to_contain_text(shop.id("f-129"))
    await expect(rows.last).to_contain_text("create the topic, then send it again topic_unavailable")
    await page.unroute_all()
    await page.route("**/v1/batch", lambda route: answer_items(route, {"status": 409, "problem": {}}))
    await action(page).get_by_role("button", name="Close").click()
    await page.get_by_role("button", name="Commit all…").click()
    await begin(page, rate=500)
    await expect(action(page).locator("[role=status]").first).to_have_text("done: 130 of 130, 0 failed")
    await expect(action(page)).to_contain_text("changed meanwhile")
