"""The API reference at /docs/: every call and schema of openapi.json, from this host alone and without a key."""

import aiohttp
from playwright.async_api import expect

from tests.console.conftest import NewPage
from tests.support.console.axe import violations
from tests.support.console.browser import NARROW
from tests.support.rest.guarded import Guarded


async def test_the_reference_shows_every_call_and_schema_without_a_key(new_page: NewPage, instances: Guarded) -> None:
    url, page = instances.here.url, await new_page(size=NARROW, dark=True)
    async with aiohttp.ClientSession() as session, session.get(f"{url}/openapi.json") as answer:
        described = await answer.json()
    await page.goto(f"{url}/docs/")
    names = {operation["operationId"] for item in described["paths"].values() for operation in item.values()}
    names |= {f"schema-{name}" for name in described["components"]["schemas"]}
    await expect(page.locator("section")).to_have_count(len(names))
    assert set(await page.locator("section").evaluate_all("all => all.map((one) => one.id)")) == names
    await page.get_by_label("Filter").fill("history")
    await page.get_by_role("link", name="/v1/transactions/{id}/history").click()
    await expect(page.locator("#getHistory")).to_be_in_viewport()
    assert await violations(page) == []
