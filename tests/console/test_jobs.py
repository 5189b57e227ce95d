"""Manual actions: a preview, a reason, a job with progress, and a result for each transaction."""

import json

import pytest
from playwright.async_api import Page, Request, Route, expect

from tests.support.console.shop import Shop


async def begin(page: Page, reason: str = "endpoint mended", *, rate: int | None = None) -> None:
    """Enter a reason in the open dialog, and press its button."""
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Reason").fill(reason)
    if rate is not None:
        await dialog.get_by_label("At most").fill(str(rate))
    await dialog.locator("button[type=submit]").click()


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
    await expect(dialog).not_to_contain_text("other-1")
    await expect(dialog).to_contain_text("final")
    submit = dialog.get_by_role("button", name="Roll back 12")
    await expect(submit).to_be_disabled()
    await dialog.get_by_label("Reason").fill("   ")
    await expect(submit).to_be_disabled()
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)
    assert (await shop.rest.call("GET", "/jobs")).expect(200)["jobs"] == []


@pytest.mark.parametrize("action, state", [("Commit", "committed"), ("Roll back", "rolled back")])
async def test_a_job_ends_all_that_a_filter_finds_with_its_reason_as_their_remark(
    page: Page, shop: Shop, action: str, state: str
) -> None:
    await shop.group("shop")
    await shop.prepared([f"j-{number}" for number in range(7)])
    await shop.prepared(["not-1"])
    await page.goto(shop.at("transactions?id=j-"))
    await page.get_by_role("button", name=f"{action} all…").click()
    await begin(page, "decided by hand", rate=200)
    await expect(page.locator(".heading").get_by_text("done", exact=True)).to_be_visible()
    await expect(page.get_by_text("7 of 7")).to_be_visible()
    rows = page.get_by_role("table").locator("tbody tr")
    await expect(rows).to_have_count(7)
    await expect(rows.first).to_contain_text(state)
    shown = await shop.rest.show("j-3")
    assert (shown["state"], shown["cause"], shown["remark"]) == (state.replace(" ", "_"), "operator", "decided by hand")
    assert (await shop.rest.show("not-1"))["state"] == "prepared"
    await page.get_by_role("link", name="j-3").click()
    await expect(page.get_by_text("decided by hand").first).to_be_visible()


async def test_one_transaction_is_ended_by_a_job_of_its_own(page: Page, shop: Shop) -> None:
    await shop.group("shop")
    await shop.prepared(["one-1", "one-2"])
    await page.goto(shop.at("transactions/one-1"))
    await page.get_by_role("button", name="Commit…").click()
    await begin(page)
    await expect(page.get_by_text("1 of 1")).to_be_visible()
    assert (await shop.rest.show("one-1"))["state"] == "committed"
    assert (await shop.rest.show("one-2"))["state"] == "prepared"


async def test_a_job_is_stopped_and_what_is_left_stays_as_it_was(page: Page, shop: Shop) -> None:
    await shop.group("shop")
    await shop.prepared([f"st-{number:03}" for number in range(300)])
    await page.goto(shop.at("transactions?state=prepared"))
    await page.get_by_role("button", name="Roll back all…").click()
    await begin(page, rate=1)
    await expect(page.locator(".heading").get_by_text("running")).to_be_visible()
    await page.get_by_role("button", name="Stop").click()
    await expect(page.locator(".heading").get_by_text("stopped", exact=True)).to_be_visible()
    await expect(page.get_by_text("not touched")).to_be_visible()
    await page.get_by_label("Result").select_option("waiting")
    await expect(page.get_by_role("table").locator("tbody tr").first).to_contain_text("waiting")
    assert (await shop.rest.show("st-299"))["state"] == "prepared"
    await page.get_by_role("navigation", name="Where this is").get_by_role("link", name="Jobs").click()
    await expect(page.get_by_role("row", name="endpoint mended")).to_contain_text("stopped")


async def test_accepted_and_done_are_different_words(page: Page, shop: Shop) -> None:
    """An accepted job says that nothing has changed yet; a job that is done has its results."""
    await shop.group("shop")
    await shop.prepared(["a-1"])
    job = {"id": "held", "action": "rollback", "ids": ["a-1"], "reason": "r"}
    accepted = (await shop.rest.call("POST", "/jobs", job)).expect(202)
    await shop.rest.until("a-1", "rolled_back")
    held = True

    async def answer(route: Route) -> None:
        if held:
            shown = {**accepted, "state": "accepted", "items": [], "next": None}
            await route.fulfill(status=200, content_type="application/json", body=json.dumps(shown))
        else:
            await route.continue_()

    await page.route("**/v1/jobs/held*", answer)
    await page.goto(shop.at("jobs/held"))
    main = page.get_by_role("main")
    await expect(main).to_contain_text("accepted, not started")
    await expect(main).to_contain_text("nothing has been changed yet")
    await expect(main.locator(".heading").get_by_text("done")).to_have_count(0)
    held = False
    await expect(main.locator(".heading")).to_contain_text("done")
    await expect(main).not_to_contain_text("accepted, not started")


async def test_a_start_whose_answer_is_lost_is_repeated_under_the_same_id(page: Page, shop: Shop) -> None:
    """Only one job starts, whatever the network does."""
    await shop.group("shop")
    await shop.prepared(["lost-1"])
    sent: list[Request] = []

    async def lose(route: Route) -> None:
        body = route.request.post_data_json or {}
        if body.get("preview"):
            await route.continue_()
            return
        sent.append(route.request)
        if len(sent) == 1:
            await route.fetch()
            await route.abort()
        else:
            await route.continue_()

    await page.route("**/v1/jobs", lose)
    await page.goto(shop.at("transactions/lost-1"))
    await page.get_by_role("button", name="Roll back…").click()
    await begin(page)
    await expect(page.get_by_text("not known whether the job was accepted")).to_be_visible()
    await page.get_by_role("dialog").locator("button[type=submit]").click()
    await expect(page.locator(".heading").get_by_text("done", exact=True)).to_be_visible()
    first, second = (request.post_data_json for request in sent)
    assert first == second
    await page.unroute("**/v1/jobs", lose)
    assert len((await shop.rest.call("GET", "/jobs")).expect(200)["jobs"]) == 1


async def test_what_fails_is_shown_with_its_reason(page: Page, shop: Shop) -> None:
    await shop.group("shop")
    await shop.prepared(["bad-1", "bad-2"])
    await shop.rest.commit("bad-1")
    job = {"id": "mixed", "action": "rollback", "ids": ["bad-1", "bad-2"], "reason": "r"}
    (await shop.rest.call("POST", "/jobs", job)).expect(202)
    await page.goto(shop.at("jobs/mixed?result=failed"))
    row = page.get_by_role("table").locator("tbody tr")
    await expect(row).to_have_count(1)
    await expect(row).to_contain_text("already_ended")
    await expect(row).to_contain_text("committed")
