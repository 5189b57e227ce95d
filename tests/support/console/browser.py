"""The system's Chromium, driven by Playwright, and what a page did that no page of the console may do."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright, expect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_MS = 120_000
"""Only a broken product needs this long."""
STARTED_MS = 300_000
"""Playwright's own 30 s pass where five workers and a broker start; then every test of the console would fail."""
WIDE, NARROW = (1280, 800), (375, 812)

expect.set_options(timeout=PATIENCE_MS)


def executable() -> str:
    """Return where the browser is; fails the test with what to install if there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(
            "the tests of the console need Chromium: apt-get install --no-install-recommends chromium "
            f"(or any of {', '.join(NAMES)} on the PATH); `make browser` does it, as root or with sudo",
            pytrace=False,
        )
    return found


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Run one browser process."""
    # Chromium refuses its sandbox to root; /dev/shm is small in containers.
    options = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable(), args=options, timeout=STARTED_MS)
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Conduct:
    """What the pages of one test asked for and complained of."""

    urls: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("request", self._requested)
        page.on("console", self._told)
        page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))

    def _requested(self, request: Request) -> None:
        self.urls.append(request.url)

    def _told(self, message: ConsoleMessage) -> None:
        # That a call is refused, or the coordinator away, is told in the page; the browser notes it here as well.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.complaints.append(message.text)

    @property
    def hosts(self) -> set[str]:
        return {urlsplit(url).netloc for url in self.urls if not url.startswith(("data:", "about:"))}


async def open_page(browser: Browser, conduct: Conduct, *, size: tuple[int, int] = WIDE, dark: bool = False) -> Page:
    """Open a page in a context of its own: nothing is shared with another test."""
    context = await browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light", timezone_id="UTC"
    )
    context.set_default_timeout(PATIENCE_MS)
    page = await context.new_page()
    conduct.watch(page)
    return page
