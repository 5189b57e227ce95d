"""One client in a parent and in the children that it forks, as servers that fork their workers use it."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.rest.client import RestWorld

SERVICE = """
import os, sys, threading, warnings
from halfway.client import Message, SyncHalfway

warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is the point
client = SyncHalfway(sys.argv[1], "shop", prepare_timeout_s=5, end_timeout_s=5)

def send(key):
    with client.transaction([Message(topic="orders", key=key, value="v")]):
        pass

send("before")
stop = threading.Event()
busy = [threading.Thread(target=lambda: [send("busy") for _ in iter(stop.is_set, True)]) for _ in range(3)]
for thread in busy:
    thread.start()
for number in range(5):
    child = os.fork()
    if child == 0:
        send(f"child-{number}")
        if number % 2:
            client.close()
        sys.exit()  # with all of Python's clean-up
    assert os.waitpid(child, 0)[1] == 0
    send(f"parent-{number}")
stop.set()
for thread in busy:
    thread.join()
send("after")
client.close()
"""


async def test_parent_and_children_use_one_client_side_by_side(world: RestWorld, tmp_path: Path) -> None:
    """The children's clean-up takes nothing from the parent; no lock that a thread held at the fork blocks them."""
    service = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVICE, world.url, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60):
            _, told = await service.communicate()
    except TimeoutError:
        service.kill()
        await service.wait()
        pytest.fail("the service hangs")
    assert (service.returncode, told.decode()) == (0, "")
    keys = {record.key.decode() for record in world.memory.records("orders") if record.key is not None}
    assert keys == {"before", "busy", "after", *(f"{who}-{n}" for who in ("child", "parent") for n in range(5))}
    listed = (await world.call("GET", "/v1/transactions?group=shop&state=prepared")).body
    assert listed["transactions"] == []
