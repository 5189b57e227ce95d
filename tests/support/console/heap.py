"""What a page holds."""

from playwright.async_api import Page


async def heap(page: Page) -> tuple[float, float]:
    """Give the bytes that the page's objects take once the garbage is gone, and its nodes."""
    session = await page.context.new_cdp_session(page)
    await session.send("HeapProfiler.collectGarbage")
    await session.send("Performance.enable")
    found = {one["name"]: one["value"] for one in (await session.send("Performance.getMetrics"))["metrics"]}
    await session.detach()
    return found["JSHeapUsedSize"], found["Nodes"]
