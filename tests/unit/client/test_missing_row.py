"""A block whose client has a barrier does not commit without the barrier's row."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from sqlite3 import OperationalError

import pytest

from halfway.client import Halfway, Message, MissingRowError
from halfway.client.barrier import Barrier, sqlite_transactions
from tests.support.rest.client import RestWorld
from tests.support.waiting import until_true
from tests.unit.client.test_settling import final_state

ORDER = Message(topic="orders", key="42", value="paid")


@pytest.fixture
def barrier(tmp_path: Path) -> Barrier:
    barrier = Barrier("sqlite", sqlite_transactions(tmp_path / "shop.sqlite"))
    barrier.create()
    return barrier


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
