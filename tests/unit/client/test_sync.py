"""The client for threads, forks, and blocks that end in an unusual place; it has the types of the asynchronous one."""

import asyncio
import contextvars
import inspect
import socket
import sys
import threading
import typing
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from halfway.client import ClientClosedError, Halfway, InvalidUrlError, Message, SyncHalfway
from halfway.client.barrier import Barrier
from halfway.client.django import django_barrier
from halfway.client.producer.sync import Settings, _Work
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.support.waiting import GENEROUS_S

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
    assert world.requests.counts["stream", 101] == 1
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

    async def late(client: Halfway) -> None:
        async with client, client.transaction([ORDER]):
            await client.close()
            raise KeyError("taken")

    with pytest.raises(KeyError, match="taken"):  # as when uvicorn's time for a graceful shutdown is over
        await late(Halfway(world.url, "shop"))


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


SERVICE = """
import os, sys, threading, warnings
from halfway.client import Message, SyncHalfway

warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is the point
client = SyncHalfway(sys.argv[1], "shop", prepare_timeout_s=60, end_timeout_s=60)

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
    """The children's clean-up does not affect the parent; no lock that a thread held at the fork blocks them."""
    assert await run(SERVICE, world.url) == (0, "")
    keys = {record.key.decode() for record in world.memory.records("orders") if record.key is not None}
    assert keys == {"before", "busy", "after", *(f"{who}-{n}" for who in ("child", "parent") for n in range(5))}
    listed = (await world.call("GET", "/v1/transactions?group=shop&state=prepared")).body
    assert listed["transactions"] == []


LOCKED = """
import os, sys, threading, warnings
from halfway.client import CheckVerifier, SyncHalfway
from halfway.client import sqlalchemy
from halfway.client.threads import BoundedThreads

warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is the point
verifier, client = CheckVerifier("whsec_" + "A" * 40), SyncHalfway("http://127.0.0.1:1", "shop")
locks = [verifier._lock, client._lock, sqlalchemy._interception_lock]
held, done = threading.Event(), threading.Event()

def hold():
    with locks[0], locks[1], locks[2]:
        held.set()
        done.wait()

stuck = BoundedThreads(1, "stuck")
stuck.start(done.wait)
holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if child == 0:
    with locks[0], locks[1], locks[2]:
        os._exit(stuck.start(lambda: 7).result())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
done.set()
holder.join()
"""


async def test_no_lock_that_a_thread_holds_at_the_fork_blocks_the_child() -> None:
    """Locks of a client, of a verifier and of session producers; and threads with stuck checks."""
    assert await run(LOCKED) == (0, "")


OPEN = """
import asyncio, multiprocessing, sys, warnings
from halfway.client import Halfway, Message, WrongEventLoopError

warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads

async def send(client, key):
    async with client.transaction([Message(topic="orders", key=key, value="v")]):
        pass

async def in_child(client):
    try:
        await send(client, "never")
    except WrongEventLoopError as error:
        assert "before a fork" in str(error)
    async with client:
        await send(client, "child")

async def main(stream):
    async with Halfway(sys.argv[1], "shop", stream=stream) as client:
        await send(client, "before")
        used = client._transport._pool, client._shared._stream
        child = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(in_child(client)))
        child.start()
        await asyncio.to_thread(child.join)
        assert child.exitcode == 0
        await send(client, "after")
        assert (client._transport._pool, client._shared._stream) == used, "a connection was lost"

for stream in (True, False):
    asyncio.run(main(stream))
"""


SIGNALLED = """
import signal, sys, threading
from halfway.client import ClientClosedError, Message, SyncHalfway
from halfway.client.producer.sync import Halfway, _LoopThread

def interrupted(kind, name):
    real = getattr(kind, name)
    def call(*arguments):
        result = real(*arguments)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        return result
    setattr(kind, name, call)

client = SyncHalfway(sys.argv[1], "shop")
signal.signal(signal.SIGTERM, lambda *_: client.close())
if sys.argv[2] == "call":
    client.check_secrets()
    interrupted(client._thread._loop, "call_soon_threadsafe")
else:
    interrupted(Halfway, "open")
try:
    client.check_secrets()
    client.check_secrets()
except ClientClosedError:
    sys.exit()
sys.exit("the client is open")
"""


@pytest.mark.parametrize("during", ["call", "opening"])
async def test_a_handler_of_a_signal_may_close_the_client_at_any_time(world: RestWorld, during: str) -> None:
    assert await run(SIGNALLED, world.url, during) == (0, "")


async def test_the_child_opens_the_client_of_its_parent_for_itself(world: RestWorld) -> None:
    """It does not wait on the parent's stream, nor does the parent's event loop lose sight of its connections."""
    assert await run(OPEN, world.url) == (0, "")
    assert [record.key for record in world.memory.records("orders")] == [b"before", b"child", b"after"] * 2


def test_the_client_for_threads_knows_every_setting() -> None:
    named = inspect.signature(Halfway).parameters.values()
    settings = {one.name: one.annotation for one in named if one.kind is one.KEYWORD_ONLY}
    settings["barrier"] = "Barrier | None"  # an AsyncBarrier belongs to an event loop
    known = {name: hint.__forward_arg__ for name, hint in Settings.__annotations__.items()}
    assert known == settings
    assert inspect.signature(SyncHalfway).parameters["settings"].annotation == "Unpack[Settings]"


def test_the_barrier_of_django_knows_every_setting() -> None:
    own, known = inspect.signature(django_barrier).parameters, inspect.signature(Barrier).parameters
    for name in ("table", "retention_s"):
        assert (own[name].annotation, own[name].default) == (known[name].annotation, known[name].default)
    assert typing.Any not in {one.annotation for one in own.values()}


def test_both_packages_say_that_they_are_typed() -> None:
    assert all(files(name).joinpath("py.typed").is_file() for name in ("halfway.client", "halfway.testing"))


def test_the_calls_for_threads_take_the_parameters_of_the_asynchronous_ones() -> None:
    for name in ("register", "start", "prepare", "end", "show", "check_secrets", "check_verifier"):
        assert inspect.signature(getattr(SyncHalfway, name)) == inspect.signature(getattr(Halfway, name))
        assert not inspect.iscoroutinefunction(getattr(SyncHalfway, name))


def test_a_message_keeps_the_value_that_it_was_made_with() -> None:
    """A caller may fill one dict again for the next message; both are sent later, with the session's commit."""
    line = {"items": [1]}
    first = Message(topic="orders", value=line)
    line["items"].append(2)
    assert first.as_json()["value"] == {"type": "JSON", "data": {"items": [1]}}
    assert first.value == {"items": [1]}
