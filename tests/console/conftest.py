"""The console in a real browser, one browser process per worker, with coordinators on real HTTP.

The browser's driver uses the event loop of the session, so every test here runs on it, and all on one worker.
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
from tests.support.rest.client import RestWorld
from tests.support.rest.guarded import Guarded, guarded

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
            item.add_marker(pytest.mark.xdist_group("browser"))


@pytest.fixture(autouse=True)
def leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no instance run on in the loop after its test."""
    monkeypatch.setattr(RestWorld, "leaves", True)


class NewPage(Protocol):
    """Opens pages that share nothing, and that are closed at the end of the test."""

    async def __call__(self, *, size: tuple[int, int] = WIDE, dark: bool = False) -> Page: ...


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="session")
async def conduct() -> AsyncIterator[Conduct]:
    """Record what the pages do; fail the test if a page violates its policy or calls another host."""
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
    """Provide an empty coordinator with open access."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as session, Shop(session) as shop:
        yield shop


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def coordinator(kafka: Kafka, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[CoordinatorProcess]:
    """Provide one coordinator per module, on a real broker."""
    # On a busy machine, a late answer to a check would count as no answer.
    settings = {"HALFWAY_CHECK_TIMEOUT_S": "60"}
    process = CoordinatorProcess(kafka.bootstrap_servers, tmp_path_factory.mktemp("console"), settings)
    await asyncio.to_thread(process.start)
    yield process
    process.close()


@pytest_asyncio.fixture(loop_scope="session")
async def instances() -> AsyncIterator[Guarded]:
    """Provide two instances with access control, each with one shard."""
    async with guarded() as found:
        yield found


@pytest_asyncio.fixture(loop_scope="session")
async def endpoint() -> AsyncIterator[CheckEndpoint]:
    """Provide a check endpoint that answers `unknown` until its answer is changed."""
    endpoint = CheckEndpoint()
    await endpoint.start()
    yield endpoint
    await endpoint.stop()
