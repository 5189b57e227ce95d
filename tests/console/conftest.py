"""The console in a real browser, one process of it for each worker, over coordinators on real HTTP.

The browser's driver is on the event loop of the session, so every test here runs on it; and all are on one worker.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import aiohttp
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page

from tests.support.brokers.fixtures import Kafka
from tests.support.console.browser import WIDE, Conduct, chromium, open_page
from tests.support.console.shop import Shop
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.rest.guarded import Guarded, guarded

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
            item.add_marker(pytest.mark.xdist_group("browser"))


class NewPage(Protocol):
    """Opens pages that share nothing and end with the test."""

    async def __call__(self, *, size: tuple[int, int] = WIDE, dark: bool = False) -> Page: ...


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="session")
async def conduct() -> AsyncIterator[Conduct]:
    """Give what the pages did; no test ends well whose page broke its policy or asked another host."""
    conduct = Conduct()
    yield conduct
    assert conduct.complaints == []
    assert {host.rpartition(":")[0] for host in conduct.hosts} <= {"127.0.0.1"}


@pytest_asyncio.fixture(loop_scope="session")
async def new_page(browser: Browser, conduct: Conduct) -> AsyncIterator[NewPage]:
    pages: list[Page] = []

    async def make(*, size: tuple[int, int] = WIDE, dark: bool = False) -> Page:
        pages.append(await open_page(browser, conduct, size=size, dark=dark))
        return pages[-1]

    yield make
    for page in pages:
        await page.context.close()


@pytest_asyncio.fixture(loop_scope="session")
async def page(new_page: NewPage) -> Page:
    return await new_page()


@pytest_asyncio.fixture(loop_scope="session")
async def shop() -> AsyncIterator[Shop]:
    """Give a coordinator with nothing in it, under open access."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as session, Shop(session) as shop:
        yield shop


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def coordinator(kafka: Kafka, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[CoordinatorProcess]:
    """Give a coordinator of its own to each module that runs on a real broker."""
    # A check that a busy test answers late would count as one that was not answered.
    settings = {"HALFWAY_CHECK_TIMEOUT_S": "60"}
    process = CoordinatorProcess(kafka.bootstrap_servers, tmp_path_factory.mktemp("console"), settings)
    await asyncio.to_thread(process.start)
    yield process
    process.close()


@pytest_asyncio.fixture(loop_scope="session")
async def instances() -> AsyncIterator[Guarded]:
    """Give two instances, with a shard each, that ask for keys."""
    async with guarded() as found:
        yield found


@pytest_asyncio.fixture(loop_scope="session")
async def endpoint() -> AsyncIterator[CheckEndpoint]:
    """Give a check endpoint that answers `unknown` until it is told another."""
    endpoint = CheckEndpoint()
    await endpoint.start()
    yield endpoint
    await endpoint.stop()
