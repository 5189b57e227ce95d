"""The frames that docs/api.md shows are answered as it says."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.support.waiting import GENEROUS_S
from tests.unit.http.stream.conftest import Connects, Raw

IDS: dict[str, str] = {}
PAGE = (Path(__file__).parents[4] / "docs" / "api.md").read_text(encoding="utf-8")
PAGE = re.sub(r"\bID-\d", lambda placeholder: IDS.setdefault(placeholder[0], named_id(placeholder[0])), PAGE)
EXAMPLES = re.compile(r"^```stream\n(.*?)^```", re.MULTILINE | re.DOTALL)


def frames() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the sender of each frame, and the frame."""
    for example in EXAMPLES.findall(PAGE):
        for line in example.splitlines():
            yield line[0], json.loads(line[2:])


def matches(expected: Any, found: Any) -> bool:
    """Return whether a frame matches the page, where `…` matches any text."""
    if expected == "…":
        return isinstance(found, str)
    if isinstance(expected, dict):
        return expected.keys() == found.keys() and all(matches(value, found[name]) for name, value in expected.items())
    if isinstance(expected, list):
        return len(expected) == len(found) and all(map(matches, expected, found))
    return bool(expected == found)


async def received(raw: Raw, waiting: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the next part of a frame: a server's frame may contain several frames of the page."""
    while not waiting:
        frame = await raw.frame()
        for name, items in frame.items():
            waiting += [{name: [item]} for item in items] if isinstance(items, list) else [{name: items}]
    return waiting.pop(0)


async def test_every_frame_is_answered_as_the_page_says(world: RestWorld, connected: Connects) -> None:
    """Consecutive answers on the page may arrive in any order."""
    await world.call("PUT", "/v1/groups/batch-jobs", {"check": {"mode": "pull"}, "topics": ["orders"]})
    raw = await connected(world)
    expected: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []

    async def settle() -> None:
        while expected:
            if "checks" in expected[0]:
                world.memory.clock.advance(6)
                for shard in world.coordinator.shards.served:
                    await world.coordinator.scan(shard, world.memory.clock.now_ms())
            found = await received(raw, waiting)
            matching = [one for one in expected if matches(one, found)]
            assert matching, (found, expected)
            expected.remove(matching[0])

    for sender, frame in frames():
        if sender == ">":
            await settle()
            await raw.send(json.dumps(frame))
        else:
            expected.append(frame)
    await asyncio.wait_for(settle(), GENEROUS_S)


async def test_the_first_frame_is_the_one_that_the_page_shows(world: RestWorld) -> None:
    shown = json.loads(re.findall(r'^\{"hello".*$', PAGE, re.MULTILINE)[0])
    async with world.session.ws_connect(f"{world.url}/v1/stream", protocols=("halfway.stream.v1",)) as socket:
        assert await socket.receive_json() == shown


async def test_the_frame_of_a_stop_is_the_one_that_the_page_shows(world: RestWorld, connected: Connects) -> None:
    shown = json.loads(re.findall(r'^\{"closing".*$', PAGE, re.MULTILINE)[0])
    raw = await connected(world)
    stopping = asyncio.create_task(world.api.drain(asyncio.get_running_loop().time() + 10))
    assert await raw.frame() == shown
    assert (await raw.end())[1] == 1001
    await stopping
