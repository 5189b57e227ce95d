"""Blocks of a client with a barrier: one that opens the local transaction itself, and one that forgets its row."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from sqlite3 import OperationalError
from typing import Any

import pytest

from halfway.client import Halfway, Message, MissingRowError, NoBarrierError, PrepareUnconfirmedError, SyncHalfway
from halfway.client.barrier import Barrier, LateTransactionError, UncommittedConnectionError, sqlite_transactions
from halfway.client.producer.block import Block, SyncBlock
from tests.support.client.shop import final_state
from tests.support.rest.client import RestWorld
from tests.support.waiting import until_true

ORDER = Message(topic="orders", key="42", value="paid")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with sqlite_transactions(tmp_path / "shop.sqlite")() as connection:
        connection.execute("CREATE TABLE orders (id text PRIMARY KEY)")
    return tmp_path / "shop.sqlite"


def orders(path: Path) -> int:
    with sqlite_transactions(path)() as connection:
        return int(connection.execute("SELECT count(*) FROM orders").fetchone()[0])


async def place(world: RestWorld, barrier: Barrier, begin: Any, *, fails: bool = False, threads: bool = False) -> str:
    """Place an order in a block, and return the transaction's id."""

    def work(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO orders VALUES ('42')")
        if fails:
            raise LookupError

    def in_thread() -> str:
        with SyncHalfway(world.url, "shop", barrier=barrier) as client:
            block: SyncBlock = client.transaction([ORDER], begin)
            with block as connection:
                work(connection)
            return block.id

    if threads:
        return await asyncio.to_thread(in_thread)
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        block: Block = client.transaction([ORDER], begin)
        async with block as connection:
            work(connection)
        return block.id


@pytest.mark.parametrize("threads", [False, True])
async def test_a_block_commits_the_local_transaction_and_its_messages(
    world: RestWorld, barrier: Barrier, path: Path, *, threads: bool
) -> None:
    own = await place(world, barrier, sqlite_transactions(path), threads=threads)
    assert (barrier.look(own), orders(path), await final_state(world, own)) == ("commit", 1, "committed")


@pytest.mark.parametrize("threads", [False, True])
async def test_an_exception_rolls_both_back(world: RestWorld, barrier: Barrier, path: Path, *, threads: bool) -> None:
    with pytest.raises(LookupError):
        await place(world, barrier, sqlite_transactions(path), fails=True, threads=threads)
    assert orders(path) == 0
    assert not world.memory.records("orders")


@pytest.mark.parametrize("threads", [False, True])
async def test_a_function_that_does_not_commit_is_found_at_its_first_use(
    world: RestWorld, barrier: Barrier, path: Path, *, threads: bool
) -> None:
    """Otherwise the messages of an order that is not there would be sent."""

    @contextmanager
    def begin() -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(path)) as connection:
            yield connection

    with pytest.raises(UncommittedConnectionError, match=r"engine\.begin"):
        await place(world, barrier, begin, threads=threads)
    assert orders(path) == 0
    assert not world.memory.records("orders")


async def test_a_function_that_was_seen_to_commit_is_trusted(
    world: RestWorld, barrier: Barrier, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a block costs no further connection."""
    await place(world, barrier, sqlite_transactions(path))
    with sqlite_transactions(path)() as connection:
        connection.execute("DELETE FROM orders")
    monkeypatch.setattr(barrier, "look", None)
    await place(world, barrier, sqlite_transactions(path))
    assert orders(path) == 1


@contextmanager
def leaves_open(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as connection:
        yield connection


async def test_no_function_is_trusted_because_of_another_one(world: RestWorld, path: Path) -> None:
    """All functions of `contextmanager` share code, and all objects of a class that of their methods."""

    class Database:
        def __init__(self, *, commits: bool) -> None:
            self.commits = commits

        @contextmanager
        def begin(self) -> Iterator[sqlite3.Connection]:
            with leaves_open(path) as connection:
                yield connection
                if self.commits:
                    connection.commit()

    barrier = Barrier("sqlite", Database(commits=True).begin)
    barrier.create()
    barrier.learn()

    @contextmanager
    def other() -> Iterator[sqlite3.Connection]:
        with leaves_open(path) as connection:
            yield connection

    for begin in (Database(commits=False).begin, other):
        with pytest.raises(UncommittedConnectionError):
            await place(world, barrier, begin)
    assert not world.memory.records("orders")


async def test_a_function_is_not_trusted_before_the_table_was_read(
    world: RestWorld, barrier: Barrier, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The barrier then ends the transaction, or leaves it to a check."""

    def fail(_: str) -> None:
        raise LookupError("no connection is free")

    with monkeypatch.context() as patch:
        patch.setattr(barrier, "look", fail)
        own = await place(world, barrier, lambda: leaves_open(path))
    assert await final_state(world, own) == "rolled_back"
    assert not world.memory.records("orders")
    assert not barrier.commits_after(lambda: leaves_open(path))


async def test_a_block_that_is_cancelled_at_its_end_is_over(
    world: RestWorld, barrier: Barrier, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one of the task is not nested in it, and the barrier ends the transaction."""

    async def cancelled(_: str) -> None:
        raise asyncio.CancelledError

    begin = sqlite_transactions(path)
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        block = client.transaction([ORDER], begin)
        with monkeypatch.context() as patch:
            patch.setattr(barrier, "look", cancelled)
            with pytest.raises(asyncio.CancelledError):
                async with block:
                    pass
        async with client.transaction([ORDER], begin):
            pass
        assert await final_state(world, block.id) == "committed"


async def test_a_block_that_joined_another_local_transaction_sends_nothing(
    world: RestWorld, barrier: Barrier, path: Path
) -> None:
    """Although `begin` is trusted: where it is the outermost, it commits."""
    open_one: list[sqlite3.Connection] = []

    @contextmanager
    def begin() -> Iterator[sqlite3.Connection]:
        if open_one:
            yield open_one[0]
            return
        with sqlite_transactions(path)() as connection:
            open_one.append(connection)
            try:
                yield connection
            finally:
                open_one.clear()

    async def joined() -> None:
        with begin() as connection:
            connection.execute("DELETE FROM orders")
            await place(world, barrier, begin)

    await place(world, barrier, begin)
    with pytest.raises(UncommittedConnectionError):
        await joined()
    assert (orders(path), len(world.memory.records("orders"))) == (1, 1)


async def test_an_exception_that_the_local_transaction_swallows_still_reaches_the_caller(
    world: RestWorld, barrier: Barrier, path: Path
) -> None:
    """Otherwise the messages of a local transaction that was rolled back would be sent."""

    @asynccontextmanager
    async def begin() -> AsyncIterator[sqlite3.Connection]:
        with closing(sqlite3.connect(path)) as connection:
            try:
                yield connection
            except LookupError:
                connection.rollback()

    with pytest.raises(LookupError):
        await place(world, barrier, begin, fails=True)
    assert not world.memory.records("orders")


async def test_nothing_is_opened_if_the_prepare_fails(barrier: Barrier) -> None:
    async with Halfway("http://127.0.0.1:1", "shop", barrier=barrier, prepare_timeout_s=0.01) as client:
        with pytest.raises(PrepareUnconfirmedError):
            async with client.transaction([ORDER], lambda: pytest.fail("opened")):
                pytest.fail("ran")


async def test_a_check_that_was_answered_refuses_the_block(world: RestWorld, barrier: Barrier, path: Path) -> None:
    """The local transaction is rolled back before the block runs."""
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        block = client.transaction([ORDER], sqlite_transactions(path))
        assert barrier.settle(block.id) == "rollback"
        with pytest.raises(LateTransactionError):
            async with block:
                pytest.fail("ran")
        assert await final_state(world, block.id) == "rolled_back"


async def test_a_repeat_learns_that_its_transaction_has_committed(
    world: RestWorld, barrier: Barrier, path: Path
) -> None:
    """The earlier call died before its end. A row that only the block itself has written does not count."""
    begin = sqlite_transactions(path)
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        own = client.new_id()
        with begin() as connection:
            barrier.insert(connection, own)
        with pytest.raises(LateTransactionError) as repeated:
            async with client.transaction([ORDER], begin, id=own):
                pytest.fail("ran")
        block = client.transaction([ORDER], begin)
        with pytest.raises(LateTransactionError) as twice:
            async with block as connection:
                barrier.insert(connection, block.id)
        assert (repeated.value.has_committed, twice.value.has_committed) == (True, False)


@pytest.mark.parametrize(
    "wrong, remedy",
    [
        (lambda client: client.transaction(ORDER), r"messages is a Message: give a list"),
        (lambda client: client.transaction({"topic": "orders"}), r"messages is a dict: give a list"),
        (lambda client: client.transaction([{"topic": "orders"}]), r"messages\[0\] is a dict: give Message\("),
        (lambda client: client.transaction([ORDER], "engine"), r"begin is str: give a function .*engine\.begin"),
        (
            lambda client: client.barrier.insert(sqlite3.connect(":memory:"), None),
            "transaction_id is None: give the id",
        ),
    ],
)
async def test_a_wrong_argument_is_named_with_what_to_give_instead(
    barrier: Barrier, wrong: Callable[[Any], Any], remedy: str
) -> None:
    with SyncHalfway("http://127.0.0.1:1", "shop", barrier=barrier) as client, pytest.raises(Exception, match=remedy):
        wrong(client)


async def test_what_begin_returns_must_be_a_context(world: RestWorld, barrier: Barrier) -> None:
    """The prepared transaction is rolled back."""
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        block = client.transaction([ORDER], lambda: 1)
        with pytest.raises(TypeError, match="begin returned int"):
            async with block:
                pytest.fail("ran")
        assert await final_state(world, block.id) == "rolled_back"


async def test_a_block_that_opens_the_local_transaction_needs_a_barrier() -> None:
    async with Halfway("http://127.0.0.1:1", "shop") as client:
        with pytest.raises(NoBarrierError, match="barrier="):
            client.transaction([ORDER], sqlite_transactions(":memory:"))


def create_orders(barrier: Barrier) -> None:
    """Run a local transaction without the barrier's row."""
    with barrier._connect() as connection:
        connection.execute("CREATE TABLE orders (id text)")


def order_in_vain(barrier: Barrier, transaction_id: str) -> None:
    """Run a local transaction whose error the service catches."""
    with suppress(OperationalError), barrier._connect() as connection:
        barrier.insert(connection, transaction_id)
        connection.execute("INSERT INTO payments VALUES ('42')")  # no such table


async def test_a_block_that_forgets_the_row_is_refused_at_its_end(world: RestWorld, barrier: Barrier) -> None:
    """It ends as a check would be answered: nothing is sent."""
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        transaction = client.transaction([ORDER])
        with pytest.raises(MissingRowError, match="as its first statement"):
            async with transaction:
                create_orders(barrier)
        assert await final_state(world, transaction.id) == "rolled_back"
    assert not world.memory.records("orders")


async def test_a_row_that_a_check_has_taken_refuses_the_block_too(world: RestWorld, barrier: Barrier) -> None:
    """The block has swallowed the LateTransactionError."""
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        with pytest.raises(MissingRowError):
            async with client.transaction([ORDER]) as transaction:
                assert barrier.settle(transaction.id) == "rollback"
        assert await final_state(world, transaction.id) == "rolled_back"


async def test_a_block_that_caught_what_rolled_its_row_back_is_refused(world: RestWorld, barrier: Barrier) -> None:
    """The row was written, but there is no order: a message would be one of nothing."""
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        with pytest.raises(MissingRowError, match="let an error that rolls it back leave the block"):
            async with client.transaction([ORDER]) as transaction:
                order_in_vain(barrier, transaction.id)
        assert await final_state(world, transaction.id) == "rolled_back"
    assert not world.memory.records("orders")


async def test_a_block_with_the_row_commits_whoever_has_written_it(world: RestWorld, barrier: Barrier) -> None:
    """Another Barrier, or another process, writes it into the same table."""
    writer = Barrier("sqlite", barrier._connect)
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        async with client.transaction([ORDER]) as transaction:
            with barrier._connect() as connection:
                writer.insert(connection, transaction.id)
        assert await final_state(world, transaction.id) == "committed"


async def test_a_block_that_says_how_it_ends_needs_no_row(world: RestWorld, barrier: Barrier) -> None:
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        async with client.transaction([ORDER]) as transaction:
            await transaction.commit()
        assert await final_state(world, transaction.id) == "committed"


async def test_a_table_that_cannot_be_read_leaves_the_end_to_the_barrier(
    world: RestWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """The local transaction is over, so that an error would help nobody: a check resolves it."""
    broken = Barrier("sqlite", nullcontext)
    async with Halfway(world.url, "shop", barrier=broken) as client:
        async with client.transaction([ORDER]) as transaction:
            pass
        await until_true(lambda: not client._background)
        assert (await client.show(transaction.id))["state"] == "prepared"
    assert f"the end of transaction {transaction.id} is left to check-back" in caplog.text


async def test_a_barrier_without_a_free_connection_delays_a_block_no_longer_than_an_end(world: RestWorld) -> None:
    """Its connections may all be in use by blocks like this one."""
    is_free = threading.Event()

    @contextmanager
    def connect() -> Iterator[None]:
        is_free.wait()
        yield

    async with Halfway(world.url, "shop", barrier=Barrier("sqlite", connect), end_timeout_s=0.1) as client:
        try:
            async with client.transaction([ORDER]) as transaction:
                pass
            assert (await client.show(transaction.id))["state"] == "prepared"
        finally:
            is_free.set()


def test_every_example_writes_the_row_first() -> None:
    """In a local transaction that takes long, a row that is written last comes after the first check."""
    root = Path(__file__).parents[3]
    pages = [*root.glob("docs/*.md"), root / "packaging/client/README.md", *root.glob("examples/**/*.py")]
    for page in pages:
        lines = page.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if "barrier.insert(connection" in line.partition("`")[0]:
                before = lines[number - 1].strip()
                assert before.endswith(":") or before.startswith("halfway.prepare("), f"{page.name}:{number + 1}"
