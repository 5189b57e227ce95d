"""axe-core against a page: what it finds of WCAG 2.1 AA."""

from functools import cache
from importlib.resources import files

from playwright.async_api import Page

# Nobody reads what holds, so axe need not collect it.
_RUN = """
(tags) => axe.run(document, {runOnly: tags, resultTypes: ["violations"]}).then((all) => all.violations)
"""
_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@cache
def _axe() -> str:
    return (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")


async def violations(page: Page) -> list[str]:
    """Return each rule that the page breaks, with the elements that break it."""
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(_axe())
    found = await page.evaluate(_RUN, _TAGS)
    return [
        f"{rule['id']} ({rule['help']}): {node['html'][:200]} {node['failureSummary'][:300]}"
        for rule in found
        for node in rule["nodes"]
    ]
