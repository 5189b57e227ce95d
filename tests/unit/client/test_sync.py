"""The client for threads runs the asynchronous one."""

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from halfway.client import ClientClosedError, InvalidUrlError, Message, SyncHalfway
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld

ORDER = Message(topic="orders", key="42", value="paid")
ORDER_ID = named_id("order-42")


async def test_many_threads_share_one_client(world: RestWorld) -> None:
    def run_one(client: SyncHalfway) -> None:
        with client.transaction([ORDER]):
            pass

    def work() -> None:
        with SyncHalfway(world.url, "shop") as client, ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: run_one(client), range(40)))

    await asyncio.to_thread(work)
    assert len(world.memory.records("orders")) == 40
    assert "halfway-client" not in {thread.name for thread in threading.enumerate()}


def test_a_call_that_is_under_way_when_the_client_is_closed_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hung:
        client = SyncHalfway(f"http://127.0.0.1:{hung.getsockname()[1]}", "shop", prepare_timeout_s=60)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(client.prepare, [ORDER], id=ORDER_ID)
            hung.accept()[0].close()  # the first attempt is under way
            client.close()
            with pytest.raises(ClientClosedError):
                call.result(30)


def test_bad_use_is_told_at_once() -> None:
    wrong: Any = {"topic": ["orders"]}
    with SyncHalfway("http://127.0.0.1:1", "shop") as client, ThreadPoolExecutor(2) as pool:
        for call in [pool.submit(client.start, **wrong), pool.submit(client.register, policy={}, **wrong)]:
            with pytest.raises(TypeError, match="topic"):
                call.result(30)
    with pytest.raises(InvalidUrlError):
        SyncHalfway("nowhere", "shop")
    client = SyncHalfway("http://127.0.0.1:1", "shop")
    client.close()
    with pytest.raises(ClientClosedError, match="open a new one"):
        client.end("x", "commit")
