"""Access: only a login without a key, and with a key only what it allows."""

import json

import pytest
from playwright.async_api import Page, Route, expect

from tests.support.console.browser import Conduct
from tests.support.ids import named_id
from tests.support.rest.guarded import Guarded


async def sign_in(page: Page, world: Guarded, caller: str, *, keep: bool = False, address: str = "") -> None:
    await page.goto(f"{world.here.url}/console/{address}")
    await page.get_by_label("Key", exact=True).fill(world.tokens[caller] or "")
    if keep:
        await page.get_by_label("Keep it in this browser").check()
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("navigation", name="Views")).to_be_visible()


async def storage_contents(page: Page) -> tuple[str, str]:
    """Return the content of the page's storages, of the tab and of the browser."""
    tab, browser = json.loads(
        await page.evaluate("JSON.stringify([sessionStorage, localStorage].map((one) => JSON.stringify(one)))")
    )
    return tab, browser


async def test_without_a_key_there_is_a_login_and_nothing_else(
    page: Page, instances: Guarded, conduct: Conduct
) -> None:
    """For every view in the URL; the page requests only files, and one call that is refused."""
    await page.goto(f"{instances.here.url}/console/#/transactions?state=parked")
    await expect(page.get_by_role("heading", name="halfway")).to_be_visible()
    assert await page.get_by_role("link").count() == 0
    assert await page.get_by_role("button").all_inner_texts() == ["Sign in"]
    asked = [url.removeprefix(instances.here.url) for url in conduct.urls]
    assert [url for url in asked if not url.startswith("/console/")] == ["/v1/groups?limit=1"]


async def test_a_key_that_is_not_valid_is_refused_and_not_kept(page: Page, instances: Guarded) -> None:
    await page.goto(f"{instances.here.url}/console/")
    await page.get_by_label("Key", exact=True).fill("hw_o_nonsense")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_contain_text("not valid")
    assert await storage_contents(page) == ("{}", "{}")


async def test_a_key_stays_in_its_tab_and_out_of_every_url(page: Page, instances: Guarded, conduct: Conduct) -> None:
    token = instances.tokens["operator"]
    assert token is not None
    await sign_in(page, instances, "operator", address="#/transactions?group=shop")
    await expect(page.get_by_role("heading", name="Transactions")).to_be_visible()
    for view in ("Groups", "Failures", "Overview"):
        await page.get_by_role("link", name=view, exact=True).click()
        await expect(page.get_by_role("heading", name=view)).to_be_visible()
    tab, browser = await storage_contents(page)
    assert token in tab
    assert token not in browser
    await page.reload()
    await expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    assert token not in page.url
    assert [url for url in conduct.urls if token in url] == []
    other = await page.context.new_page()
    await other.goto(f"{instances.here.url}/console/")
    await expect(other.get_by_role("button", name="Sign in")).to_be_visible()


async def test_a_key_is_kept_beyond_the_tab_only_if_asked_and_until_one_signs_out(
    page: Page, instances: Guarded
) -> None:
    token = instances.tokens["operator"]
    assert token is not None
    await sign_in(page, instances, "operator", keep=True)
    tab, browser = await storage_contents(page)
    assert token in browser
    assert token not in tab
    other = await page.context.new_page()
    await other.goto(f"{instances.here.url}/console/")
    await expect(other.get_by_role("heading", name="Overview")).to_be_visible()
    await other.get_by_role("button", name="Sign out").click()
    await expect(other.get_by_role("button", name="Sign in")).to_be_visible()
    assert await storage_contents(other) == ("{}", "{}")


async def test_who_loses_the_key_is_back_at_the_login(page: Page, instances: Guarded) -> None:
    """With nothing left of the former view."""
    await sign_in(page, instances, "board", address="#/groups")
    await expect(page.get_by_role("link", name="shop")).to_be_visible()
    token = instances.tokens["board"]
    assert token is not None
    answer = await instances.call("operator", "DELETE", f"/v1/keys/{token[5:17]}")
    assert answer.status == 204
    # The links may be gone: the request for figures may have been refused first.
    await page.evaluate("location.hash = '#/transactions'")
    await expect(page.get_by_text("no longer valid")).to_be_visible()
    await expect(page.get_by_role("link", name="shop")).to_have_count(0)
    assert await storage_contents(page) == ("{}", "{}")


async def test_a_reader_looks_and_is_offered_nothing_to_do(page: Page, instances: Guarded) -> None:
    prepare = {
        "group": "shop",
        "id": named_id("read-1"),
        "messages": [{"topic": "orders", "key": "k", "value": "secret-value"}],
    }
    assert (await instances.call("operator", "POST", "/v1/transactions", prepare)).status == 201
    await sign_in(page, instances, "board", address="#/transactions")
    await page.get_by_role("link", name=named_id("read-1")).click()
    await expect(page.get_by_text("Your key may not read its messages.")).to_be_visible()
    for action in ("Check now", "Commit…", "Roll back…", "Show the messages"):
        await expect(page.get_by_role("button", name=action)).to_have_count(0)


@pytest.mark.parametrize("caller", ["shop", "operator"])
async def test_who_may_read_messages_sees_them_when_asking(page: Page, instances: Guarded, caller: str) -> None:
    prepare = {
        "group": "shop",
        "id": named_id("read-2"),
        "messages": [{"topic": "orders", "key": "k", "value": "secret-value"}],
    }
    assert (await instances.call("operator", "POST", "/v1/transactions", prepare)).status == 201
    await sign_in(page, instances, caller, address=f"#/transactions/{named_id('read-2')}")
    ask = page.get_by_role("button", name="Show the messages")
    await expect(ask).to_be_visible()
    assert "secret-value" not in await page.content()
    await ask.click()
    await expect(page.get_by_text("secret-value")).to_be_visible()
    commit = page.get_by_role("button", name="Commit…")
    await expect(commit).to_have_count(1 if caller == "operator" else 0)


async def test_a_groups_key_shows_its_own_group_alone(page: Page, instances: Guarded) -> None:
    mine, theirs = named_id("mine"), named_id("theirs")
    for group, own in (("shop", mine), ("other", theirs)):
        prepare = {"group": group, "id": own, "messages": [{"topic": "orders", "value": "v"}]}
        assert (await instances.call("operator", "POST", "/v1/transactions", prepare)).status == 201
    await sign_in(page, instances, "shop", address="#/transactions")
    await expect(page.get_by_role("link", name=mine)).to_be_visible()
    await expect(page.get_by_role("link", name=theirs)).to_have_count(0)
    await page.goto(f"{instances.here.url}/console/#/transactions/{theirs}")
    await expect(page.get_by_text("No such transaction.")).to_be_visible()
    await page.goto(f"{instances.here.url}/console/#/groups/other")
    await expect(page.get_by_role("alert").filter(has_text="Not allowed.")).to_be_visible()
    await page.get_by_role("link", name="Failures").click()
    await expect(page.get_by_text("Your key does not show failures.")).to_be_visible()
    await expect(page.get_by_text("Every topic can be written.")).to_have_count(0)


async def test_who_is_refused_as_a_whole_is_told_why(page: Page, instances: Guarded) -> None:
    """For example under a host name that the coordinator refuses."""
    refusal = {"error_code": "forbidden", "detail": "halfway is not called console.example here"}

    async def refuse(route: Route) -> None:
        await route.fulfill(status=403, content_type="application/problem+json", body=json.dumps(refusal))

    await page.route("**/v1/groups*", refuse)
    await page.goto(f"{instances.here.url}/console/")
    await expect(page.get_by_role("alert")).to_contain_text("not called console.example")
    await expect(page.get_by_role("navigation")).to_have_count(0)
