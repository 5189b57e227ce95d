"""`make screenshots`: takes the pictures of docs/console.md from coordinators with realistic data on a broker.

The transactions of two groups end, the endpoint of a third group is broken, and an operator resumes its transactions.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Final

import aiohttp
from aiohttp import web
from playwright.async_api import Page, expect

from halfway.embedded import EmbeddedConfig, EmbeddedKafka
from tests.support.console.browser import Conduct, chromium, open_page
from tests.support.coordinator.endpoints import CheckEndpoint, Json
from tests.support.coordinator.fleet import Fleet
from tests.support.coordinator.rest_client import Rest, message
from tests.support.coordinator.topics import Cluster
from tests.support.ids import new_id

FOLDER: Final = Path(__file__).parents[2] / "docs" / "console"
MOST_BYTES: Final = 150 * 1024
SIZE: Final = (1160, 700)
LOOKED_AT_S: Final = 45.0
"""How long there is traffic before the first picture, so that the charts show it."""
PARKED: Final = 240
PAGE: Final = (
    "<html><head><title>502 Bad Gateway</title></head><body><center>upstream connect error</center></body></html>"
)
BROKEN: Final = {"first_check_after_s": 0.5, "check_interval_s": 1.0, "max_interval_s": 2.0, "max_checks": 3}


async def main() -> None:
    """Run the product under traffic, and take the pictures."""
    FOLDER.mkdir(exist_ok=True)
    async with AsyncExitStack() as stack:
        broker = EmbeddedKafka(EmbeddedConfig())
        await asyncio.to_thread(broker.__enter__)
        stack.push_async_callback(asyncio.to_thread, broker.__exit__, None, None, None)
        fleet = Fleet(broker.bootstrap_servers, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.callback(fleet.close)
        await asyncio.to_thread(fleet.start, 2)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        rest = Rest(session, fleet.members[0].url, fleet.members[0].health_url)
        await Cluster(broker.bootstrap_servers).make_exactly("orders", "coupons", "mails")
        await stack.enter_async_context(_traffic(rest))
        browser = await stack.enter_async_context(chromium())
        page = await open_page(browser, Conduct(), size=SIZE)
        await _pictures(page, fleet.members[0].url)
        dark = await open_page(browser, Conduct(), size=SIZE, dark=True)
        await _dark_picture(dark, fleet.members[0].url)


@asynccontextmanager
async def _traffic(rest: Rest) -> AsyncIterator[None]:
    """Serve the groups `shop` and `mail`, whose transactions end, and `coupons`, whose endpoint is broken."""
    well, broken = CheckEndpoint("commit"), CheckEndpoint(_bad_gateway)
    for endpoint in (well, broken):
        await endpoint.start()
    for name, endpoint, policy in (("shop", well, {}), ("mail", well, {}), ("coupons", broken, BROKEN)):
        topics = ["orders", "coupons", "mails"]
        (await rest.put_group(name, topics=topics, urls=[endpoint.url], policy=policy)).expect(201)
    messages = [message("coupons", {"type": "JSON", "data": {"coupon": "SPRING", "percent": 10}}, key="customer-7")]
    for _ in range(PARKED):
        (await rest.prepare("coupons", messages, as_id=new_id(), retry=True)).expect(200, 201)
    served = asyncio.create_task(_serve(rest))
    try:
        yield
    finally:
        served.cancel()
        for endpoint in (well, broken):
            await endpoint.stop()


def _bad_gateway(_: Json) -> web.Response:
    return web.Response(status=502, text=PAGE, content_type="text/html")


async def _serve(rest: Rest) -> None:
    """Commit most, roll some back, and leave some to their check."""
    for number in count():
        group = "mail" if number % 4 == 0 else "shop"
        messages = [message("orders", key=f"customer-{number % 50}")]
        begun = [(await rest.prepare(group, messages, retry=True)).expect(201)["id"] for _ in range(4)]
        for place, own in enumerate(begun):
            if place < 3 or number % 3:
                await rest.end(own, "rollback" if (number + place) % 7 == 0 else "commit", retry=True)
        await asyncio.sleep(0.05 + 0.1 * (number // 40 % 3))


async def _pictures(page: Page, url: str) -> None:
    await page.goto(f"{url}/console/")
    await expect(page.get_by_text(f"{PARKED} transactions of coupons")).to_be_visible(timeout=60_000)
    # The charts need time to fill; nothing is asserted about them.
    await asyncio.sleep(LOOKED_AT_S)
    await _take(page, "overview")
    await page.locator(".tile", has=page.get_by_text("Parked", exact=True)).click()
    await expect(page.get_by_role("table").get_by_role("link").first).to_be_visible()
    await _take(page, "transactions")
    await page.get_by_role("table").get_by_role("link").first.click()
    await expect(page.locator(".event").filter(has_text="Parked")).to_be_visible()
    await _take(page, "transaction")
    await page.get_by_role("button", name="Resume all parked of coupons…").click()
    await page.get_by_label("Reason").fill("INC-341: the gateway is mended")
    await page.get_by_label("At most").fill("20")
    await expect(page.get_by_role("button", name=f"Resume {PARKED}")).to_be_enabled()
    await _take(page, "resume")


async def _dark_picture(page: Page, url: str) -> None:
    await page.goto(f"{url}/console/#/transactions?state=parked&group=coupons")
    await page.get_by_role("button", name="Resume all…").click()
    await page.get_by_label("Reason").fill("INC-341: the gateway is mended")
    await page.get_by_label("At most").fill("20")
    await page.get_by_role("button", name=f"Resume {PARKED}").click()
    await expect(page.locator(".results b").first).not_to_have_text("0")
    await _take(page, "bulk-dark")


async def _take(page: Page, name: str) -> None:
    picture = await page.screenshot(path=FOLDER / f"{name}.png", animations="disabled")
    if len(picture) > MOST_BYTES:
        raise SystemExit(f"{name}.png has {len(picture)} bytes, more than {MOST_BYTES}")
    print(f"docs/console/{name}.png: {len(picture)} bytes")  # noqa: T201 - the output of make


if __name__ == "__main__":
    asyncio.run(main())
