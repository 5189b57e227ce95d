"""Text of others is shown as text everywhere: it creates no element, and runs no script."""

from typing import Any

from aiohttp import web
from playwright.async_api import Page, expect

from tests.console.test_bulk import answer_items
from tests.support.console.browser import Conduct
from tests.support.console.shop import IMPATIENT, Shop
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.waiting import until_true

SCRIPT = "<script>document.title='taken'</script>"
IMAGE = "<img src=x onerror=\"document.title='taken'\">"
HOSTILE = f"\"'>{IMAGE}{SCRIPT}"


async def shown_as_text(page: Page, text: str = HOSTILE) -> None:
    """Expect the text to be visible, and no element created from it."""
    await expect(page.get_by_text(text).first).to_be_visible()
    assert await page.locator("img[src=x]").count() == 0
    assert await page.locator("body script").count() == 0
    assert "taken" not in await page.title()


async def test_message_keys_values_and_headers(page: Page, shop: Shop, conduct: Conduct) -> None:
    await shop.group("shop")
    fields: dict[str, Any] = {
        "key": f"k{HOSTILE}",
        "value": f"v{HOSTILE}",
        "headers": [{"name": f"n{HOSTILE}", "value": f"h{HOSTILE}"}],
    }
    await shop.prepared(["x-1"], **fields)
    await page.goto(shop.at(f"transactions/{shop.id('x-1')}"))
    await page.get_by_role("button", name="Show the messages").click()
    for part in "kvnh":
        await shown_as_text(page, part + HOSTILE)


async def test_a_remark_of_the_service(page: Page, shop: Shop, conduct: Conduct) -> None:
    await shop.group("shop")
    await shop.prepared(["x-2"])
    (await shop.rest.end(shop.id("x-2"), "rollback", remark=HOSTILE)).expect(200)
    await page.goto(shop.at("transactions"))
    await shown_as_text(page)
    await page.get_by_role("link", name=shop.id("x-2")).click()
    await shown_as_text(page)


async def test_a_remark_of_a_check_endpoint(page: Page, shop: Shop, endpoint: CheckEndpoint, conduct: Conduct) -> None:
    """In the answer with the verdict."""
    endpoint.answer(
        lambda asked: web.json_response({"outcome": "rollback", "nonce": asked["nonce"], "remark": HOSTILE})
    )
    await shop.group(url=endpoint.url, policy=IMPATIENT)
    await shop.prepared(["x-3"])
    await shop.rest.until(shop.id("x-3"), "rolled_back")
    await page.goto(shop.at(f"transactions/{shop.id('x-3')}"))
    await expect(page.locator(".heading").get_by_text("rolled back")).to_be_visible()
    assert await page.locator("img[src=x]").count() == 0
    assert "taken" not in await page.title()


async def test_the_error_body_of_a_check_endpoint_is_shown_nowhere(
    page: Page, shop: Shop, endpoint: CheckEndpoint, conduct: Conduct
) -> None:
    """Neither in the view of the transaction nor in that of its group."""
    endpoint.answer(lambda _: web.Response(status=500, text=HOSTILE, content_type="text/html", reason="<b>no</b>"))
    await shop.group(url=endpoint.url, policy=IMPATIENT)
    await shop.prepared(["x-5"])
    await shop.rest.until(shop.id("x-5"), "parked")
    await page.goto(shop.at(f"transactions/{shop.id('x-5')}"))
    await expect(page.get_by_text("status 500, not 200").first).to_be_visible()
    assert "onerror" not in await page.content()
    await page.goto(shop.at("groups/shop"))
    await expect(page.get_by_role("table", name="Endpoints and their last answers")).to_contain_text(
        "status 500, not 200"
    )
    assert "onerror" not in await page.content()


async def test_the_details_of_failures_and_endpoints(page: Page, shop: Shop, conduct: Conduct) -> None:
    """In the failures, in the overview's list of problems, and in the view of a group."""
    await shop.group("shop")
    figures = (await shop.rest.call("GET", "/statistics")).expect(200)
    at = figures["at"]
    topic = {"topic": "orders", "error_code": "topic_unavailable", "detail": f"t{HOSTILE}", "refused": 3}
    figures["failures"] = {
        "topics": [
            topic
            | {"first_at": at, "last_at": at, "retry_at": None, "first_error_code": "e", "first_detail": f"f{HOSTILE}"}
        ],
        "refused": [
            {"id": "r-1", "topic": "orders", "error_code": "e", "detail": f"r{HOSTILE}", "last_at": at, "retry_at": at}
        ],
        "quarantined": [
            {"instance": "", "topic": "orders", "id": HOSTILE, "state": "refused", "since": at, "until": at}
            | {"min_bytes": None, "error_code": "e", "detail": f"q{HOSTILE}"}
        ],
        "skipped": [{"topic": "half", "reason": f"s{HOSTILE}", "count": 2, "last_at": at}],
    }
    endpoint = {"host": "http://shop:1", "well": False, "status": 500, "detail": f"e{HOSTILE}", "at": at}
    figures["groups"][0] |= {"parked": 3, "endpoints": [endpoint | {"duration_s": 0.1}]}
    await page.route("**/v1/statistics*", lambda route: route.fulfill(json=figures))
    await page.goto(shop.at("failures"))
    for part in "tfrqs":
        await shown_as_text(page, part + HOSTILE)
    await page.goto(shop.at("overview"))
    for part in "ter":
        await shown_as_text(page, part + HOSTILE)
    await page.goto(shop.at("groups/shop"))
    await expect(page.get_by_role("heading", name="shop")).to_be_visible()
    assert await page.locator("img[src=x]").count() == 0


async def test_the_reason_and_the_failures_of_a_bulk_action(page: Page, shop: Shop, conduct: Conduct) -> None:
    """In the dialog, in its progress, and as the remark of a transaction."""
    await shop.group("shop")
    await shop.prepared(["x-4", "x-5"])
    await page.goto(shop.at(f"transactions?id={shop.id('x-4')}"))
    await page.get_by_role("button", name="Commit all…").click()
    await page.get_by_label("Reason").fill(HOSTILE)
    await page.get_by_role("button", name="Commit 1").click()
    await expect(page.get_by_text("1 of 1", exact=True)).to_be_visible()
    await shown_as_text(page)
    await page.get_by_role("button", name="Close").click()
    await page.goto(shop.at(f"transactions/{shop.id('x-4')}"))
    await shown_as_text(page)
    problem = {"error_code": "e", "detail": f"why{HOSTILE}"}
    await page.route("**/v1/batch", lambda route: answer_items(route, {"status": 413, "problem": problem}))
    await page.goto(shop.at(f"transactions?id={shop.id('x-5')}"))
    await page.get_by_role("button", name="Commit all…").click()
    await page.get_by_label("Reason").fill("r")
    await page.get_by_role("button", name="Commit 1").click()
    await shown_as_text(page, f"why{HOSTILE}")


async def test_the_address_of_a_view(page: Page, shop: Shop, conduct: Conduct) -> None:
    """The author of a link chooses its filters, ids and names of views."""
    await page.goto(shop.at(f"transactions/{HOSTILE}"))
    await expect(page.get_by_role("heading", level=1)).to_contain_text("<img")
    await page.goto(shop.at(f"transactions?error={HOSTILE}&group={HOSTILE}"))
    await expect(page.get_by_label("Group")).to_be_visible()
    await page.goto(shop.at(f"groups/{HOSTILE}"))
    await expect(page.get_by_role("alert").first).to_be_visible()
    await page.goto(shop.at(HOSTILE))
    await expect(page.get_by_text("There is no such view.")).to_be_visible()
    assert await page.locator("img[src=x]").count() == 0
    assert "taken" not in await page.title()


async def test_the_policy_stops_a_script_even_if_one_got_into_the_page(
    page: Page, shop: Shop, conduct: Conduct
) -> None:
    """Neither assigned HTML, nor an inline handler, nor a script of another host."""
    await page.goto(shop.at())
    await expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    tried = await page.evaluate(
        """async (elsewhere) => {
            const tried = [];
            try { document.body.innerHTML += "<b id=made>x</b>"; tried.push("innerHTML"); } catch { /* refused */ }
            try { await fetch(elsewhere, {mode: "no-cors"}); tried.push("fetch"); } catch { /* refused */ }
            return tried;
        }""",
        shop.url.replace("127.0.0.1", "localhost") + "/console/",
    )
    assert tried == []
    # The browser reports both violations a moment later.
    wanted = ("TrustedHTML", "connect-src")
    await until_true(
        lambda: all(any(word in one for one in conduct.complaints) for word in wanted),
        what="both violations are reported",
    )
    assert {"TrustedHTML" in one or "Content Security Policy" in one for one in conduct.complaints} == {True}
    conduct.complaints.clear()
