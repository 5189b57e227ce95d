"""Blocks that end in an unusual place: in another context, after a fork, at the end of the process."""

import asyncio
import contextvars
import sys

import pytest

from halfway.client import ClientClosedError, Halfway, Message, SyncHalfway
from halfway.client.producer.sync import _Work
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.support.waiting import GENEROUS_S

ORDER = Message(topic="orders", key="42", value="paid")

FORKED = """
import os, sys, warnings
from halfway.client import ClientClosedError, Message, SyncHalfway

warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is the point
client = SyncHalfway(sys.argv[1], "shop")
try:
    with client.transaction([Message(topic="orders", key="42", value="v")]):
        child = os.fork()
        if child == 0 and sys.argv[2] == "raises":
            sys.exit(7)
except ClientClosedError as error:
    assert child == 0 and "before a fork" in str(error), error
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
client.close()
"""

LEAVES = """
import sys
from halfway.client import Message, SyncHalfway

client = SyncHalfway(sys.argv[1], "shop")
with client.transaction([Message(topic="orders", key="42", value="v")], confirm=False):
    pass
"""


async def run(script: str, *arguments: str) -> tuple[int | None, str]:
    service = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, *arguments, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(GENEROUS_S):
            _, told = await service.communicate()
    except TimeoutError:
        service.kill()
        await service.wait()
        pytest.fail("the service hangs")
    return service.returncode, told.decode()


@pytest.mark.parametrize("how", ["raises", "goes on"])
async def test_a_child_that_is_forked_inside_a_block_leaves_it_to_the_parent(world: RestWorld, how: str) -> None:
    assert await run(FORKED, world.url, how) == (0, "")
    assert len(world.memory.records("orders")) == 1


async def test_an_end_in_the_background_outlives_the_script(world: RestWorld) -> None:
    """The client was never closed."""
    assert await run(LEAVES, world.url) == (0, "")
    assert len(world.memory.records("orders")) == 1


async def test_a_block_may_be_left_in_another_context_than_it_was_entered_in(world: RestWorld) -> None:
    """FastAPI does this with a dependency that yields, and pytest with a fixture."""

    def work() -> None:
        with SyncHalfway(world.url, "shop") as client:
            block = client.transaction([ORDER])
            contextvars.copy_context().run(block.__enter__)
            contextvars.copy_context().run(block.__exit__, None, None, None)
            with client.transaction([ORDER]):
                pass

    await asyncio.to_thread(work)
    async with Halfway(world.url, "shop") as client:
        block = client.transaction([ORDER])
        await asyncio.create_task(block.__aenter__(), context=contextvars.copy_context())
        await asyncio.create_task(block.__aexit__(None, None, None), context=contextvars.copy_context())
    assert len(world.memory.records("orders")) == 3


async def test_the_blocks_own_exception_is_told_although_the_client_was_closed(world: RestWorld) -> None:
    def service(client: SyncHalfway, error: Exception | None) -> None:
        with client.transaction([ORDER]):
            client.close()
            if error is not None:
                raise error

    def work() -> None:
        with pytest.raises(KeyError, match="taken"):
            service(SyncHalfway(world.url, "shop"), KeyError("taken"))
        with pytest.raises(ClientClosedError):
            service(SyncHalfway(world.url, "shop"), None)

    await asyncio.to_thread(work)


@pytest.mark.parametrize("answered", [False, True])
async def test_an_interrupt_during_the_prepare_leaves_nothing_prepared(
    world: RestWorld, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    """Ctrl-C while a thread waits for the answer, or just before it takes an answer that has arrived."""
    real = _Work.result

    def interrupt_result(work: "_Work[object]") -> object:
        if armed:
            armed.clear()
            if answered:
                real(work)
            raise KeyboardInterrupt
        return real(work)

    armed: list[bool] = []

    def enter(client: SyncHalfway) -> str:
        block = client.transaction([ORDER])
        armed.append(True)
        with pytest.raises(KeyboardInterrupt):
            block.__enter__()
        return block.id

    def prepare(client: SyncHalfway) -> str:
        armed.append(True)
        with pytest.raises(KeyboardInterrupt):
            client.prepare([ORDER], id=named_id("prepared-alone"), new_id=True)
        return named_id("prepared-alone")

    def work() -> list[str]:
        with SyncHalfway(world.url, "shop") as client:
            client.check_secrets()  # its thread is running
            monkeypatch.setattr(_Work, "result", interrupt_result)
            return [enter(client), prepare(client)]

    for prepared in await asyncio.to_thread(work):
        assert (await world.show(prepared)).body.get("state") in (
            {"rolled_back"} if answered else {None, "rolled_back"}
        )
