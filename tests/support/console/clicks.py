"""Counts the clicks of a user."""

from typing import Self

from playwright.async_api import Page


class Clicks:
    """The clicks in a page from now on, until it is loaded anew."""

    def __init__(self) -> None:
        self.count = 0

    @classmethod
    async def counted(cls, page: Page) -> Self:
        clicks = cls()
        await page.expose_function("countedClick", clicks._one_more)
        await page.evaluate("addEventListener('click', (event) => event.isTrusted && countedClick(), true)")
        return clicks

    def _one_more(self) -> None:
        self.count += 1
