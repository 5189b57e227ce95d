"""Orders go on while halfway is away: their messages wait in the database, and each is sent exactly once."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from halfway.client import (
    AlreadyEndedError,
    Halfway,
    HalfwayError,
    InvalidRequestError,
    Message,
    PrepareUnconfirmedError,
    SyncHalfway,
    UnavailableError,
    transaction_id,
)
from halfway.client.barrier import AsyncBarrier, Barrier, NoStoreError, NoTransactionError, Store, StoreFullError
from halfway.client.barrier.drivers import carry_out
from halfway.client.barrier.maintenance import StoredSender
from halfway.client.barrier.stored import StoredTransaction
from halfway.client.sqlalchemy import AsyncSessionProducer, SessionProducer
from halfway.embedded.broker import pick_port
from tests.support.client.shop import transactional
from tests.support.databases.servers import Server
from tests.support.rest.client import HOST, RestWorld
from tests.support.waiting import GENEROUS_S, until_true

pytestmark = [pytest.mark.xdist_group("databases"), pytest.mark.timeout(1800)]

NOWHERE = "http://127.0.0.1:1"
PAST_THE_HORIZON_S = 1_000.0


def message(order: str, key: str = "k") -> Message:
    return Message(topic="orders", key=key, value={"order": order, "price": 0.1}, headers={"h": b"\xff"})


class Service:
    """A service with a database, whose orders are placed while halfway can be reached, or cannot."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self.engine = engine
        self.barrier = Barrier(engine.dialect.name, engine.begin, store=store)
        self.barrier.create()
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE orders (id varchar(40) PRIMARY KEY)"))

    def place(self, url: str, order: str, *, key: str = "k", id: str | None = None, fails: bool = False) -> str:  # noqa: A002
        patience_s = 0.05 if url == NOWHERE else GENEROUS_S
        with SyncHalfway(url, "shop", barrier=self.barrier, prepare_timeout_s=patience_s) as client:
            block = client.transaction([message(order, key)], self.engine.begin, when_away="store", id=id)
            with block as connection:
                insert(connection, order)
                if fails:
                    raise LookupError
            return block.id

    def orders(self) -> list[str]:
        with self.engine.begin() as connection:
            return list(connection.execute(text("SELECT id FROM orders ORDER BY id")).scalars())

    async def send(self, world: RestWorld, barrier: Barrier | None = None) -> int:
        async with Halfway(world.url, "shop", barrier=self.barrier) as client:
            return await StoredSender(client, barrier or self.barrier).send()


def insert(connection: Connection, order: str) -> None:
    connection.execute(text("INSERT INTO orders VALUES (:id)"), {"id": order})


@pytest.fixture(params=["sqlite", "postgresql+psycopg", "mysql+pymysql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """Give an engine of an empty database of each kind."""
    if request.param == "sqlite":
        engine = create_engine(f"sqlite:///{tmp_path / 'shop.sqlite'}", poolclass=NullPool)
        transactional(engine)
        yield engine
        return
    servers: Mapping[str, Server] = request.getfixturevalue("servers")
    with servers[request.param.partition("+")[0]].new_database(request.param) as url:
        engine = create_engine(url, poolclass=NullPool)
        yield engine
        engine.dispose()


@pytest.fixture
def service(engine: Engine) -> Service:
    return Service(engine, Store(max_rows=10))


def born_now(world: RestWorld) -> str:
    return transaction_id(uuid4().hex, world.memory.clock.now_ms())


async def pass_time(world: RestWorld, seconds: float) -> None:
    """Let time pass, and halfway forget the outcomes that are older than the horizon: it knows their tombstones."""
    world.memory.clock.advance(seconds)
    before, shards = world.memory.clock.now_ms() - 900_000, world.coordinator.shards
    for number, log in enumerate(world.memory.log.shards):
        shard, end = shards.get(number), log.half.end
        await until_true(lambda shard=shard, end=end: shard.state.half_tail >= end)  # type: ignore[misc]
        shard.state.forget(before, at_most=None, limit=1_000_000, claimed=shards.claims)


def sent(world: RestWorld) -> list[str]:
    """Return the orders whose messages consumers see, by partition in their order."""
    records = sorted(world.memory.records("orders"), key=lambda record: record.partition or 0)
    return [str(record.value).partition('"order":"')[2].partition('"')[0] for record in records]


async def test_orders_go_on_and_are_sent_once_in_their_order(world: RestWorld, service: Service) -> None:
    """A later one is stored too, although halfway is back: it must not overtake. A rollback leaves nothing."""
    for order in ("1", "2"):
        await asyncio.to_thread(service.place, NOWHERE, order)
    with pytest.raises(LookupError):
        await asyncio.to_thread(service.place, NOWHERE, "never", fails=True)
    await asyncio.to_thread(service.place, world.url, "3")
    figures = service.barrier.stored()
    assert (figures.waiting, figures.parked, figures.bytes > 300, 0 <= figures.oldest_s < 600) == (3, 0, True, True)
    assert await service.send(world) == 3
    await asyncio.to_thread(service.place, world.url, "4")
    assert await service.send(world) == 0
    assert sent(world) == service.orders() == ["1", "2", "3", "4"]
    assert service.barrier.stored().waiting == 0


def test_a_check_does_not_believe_what_the_sender_has_not_committed(servers: Mapping[str, Server]) -> None:
    with servers["mysql"].new_database("mysql+pymysql") as url:
        engine = create_engine(url, poolclass=NullPool, isolation_level="READ UNCOMMITTED")
        service = Service(engine, Store())
        stored = service.place(NOWHERE, "1")
        with engine.begin() as connection:
            assert carry_out(service.barrier.store.go_on([], [stored]), connection) == {stored}
            assert service.barrier.look(stored) == "unknown"
        assert service.barrier.look(stored) == "commit"


async def test_what_was_prepared_does_not_overtake_what_was_stored_meanwhile(
    world: RestWorld, service: Service
) -> None:
    """Another process finds halfway away while the block of this one runs."""
    engine = service.engine
    other = Barrier(engine.dialect.name, engine.begin, store=Store())

    def place_elsewhere(barrier: Barrier) -> None:
        client = SyncHalfway(NOWHERE, "shop", barrier=barrier, prepare_timeout_s=0.05)
        with client, client.transaction([message("1")], engine.begin, when_away="store"):
            pass

    @contextmanager
    def begin() -> Iterator[Connection]:
        place_elsewhere(other)
        with engine.begin() as connection:
            yield connection

    def both() -> None:
        client = SyncHalfway(world.url, "shop", barrier=service.barrier, prepare_timeout_s=GENEROUS_S)
        with client, client.transaction([message("2")], begin, when_away="store"):
            pass

    await asyncio.to_thread(both)
    assert sent(world) == []
    await service.send(world)
    assert sent(world) == ["1", "2"]


@pytest.mark.parametrize("later_s", [0, PAST_THE_HORIZON_S])
async def test_a_prepare_that_had_arrived_is_ended_by_the_sender_only(
    world: RestWorld, service: Service, later_s: float
) -> None:
    """Its answer was lost. A check may come before the sender; a lost end of an older transaction goes first."""
    older, own = born_now(world), born_now(world)
    async with Halfway(world.url, "shop") as client:
        await client.prepare([message("1")], id=older)
        await client.prepare([message("2")], id=own)
    with service.engine.begin() as connection:
        service.barrier.insert(connection, older)
        insert(connection, "1")
    await asyncio.to_thread(service.place, NOWHERE, "2", id=own)
    assert service.barrier.settle(own) == "unknown"
    await pass_time(world, later_s)
    assert await service.send(world) == 1
    assert sent(world) == ["1", "2"]
    assert service.barrier.settle(own) == "commit"


async def test_an_outage_longer_than_the_horizon_sends_once_under_a_new_id(world: RestWorld, service: Service) -> None:
    """Nobody can have committed the former id. Should its prepare arrive after all, a check says rollback."""
    own = await asyncio.to_thread(service.place, NOWHERE, "1")
    await pass_time(world, PAST_THE_HORIZON_S)
    assert await service.send(world) == 1
    assert sent(world) == ["1"]
    assert service.barrier.settle(own) == "rollback"


async def test_what_halfway_has_rolled_back_is_sent_under_a_new_id(world: RestWorld, service: Service) -> None:
    """An operator, or the policy of the group, ended the tried prepare: the local transaction has committed."""
    own = born_now(world)
    async with Halfway(world.url, "shop") as client:
        await client.prepare([message("1")], id=own)
        await client.end(own, "rollback")
    await asyncio.to_thread(service.place, NOWHERE, "1", id=own)
    assert await service.send(world) == 1
    assert sent(world) == ["1"]


@pytest.mark.parametrize("delivered", [True, False])
async def test_an_outcome_that_nobody_knows_any_more_is_left_to_a_person(
    world: RestWorld, service: Service, *, delivered: bool
) -> None:
    """It was given to halfway, the process died, and none of the service ran for longer than the horizon."""
    own = await asyncio.to_thread(service.place, NOWHERE, "1")
    service.barrier.in_transaction(service.barrier.store.go_on([], [own]))
    await pass_time(world, PAST_THE_HORIZON_S)
    assert await service.send(world) == 0
    (parked,) = service.barrier.parked()
    assert (parked.id, parked.messages[0]["key"]) == (own, "k")
    assert "may have been committed" in parked.reason
    assert service.barrier.stored().parked == 1
    assert service.barrier.resolve(own, delivered=delivered)
    assert not service.barrier.resolve(own, delivered=delivered)
    assert await service.send(world) == (0 if delivered else 1)
    assert service.barrier.parked() == []


async def test_what_halfway_refuses_for_good_is_parked_and_holds_up_nothing(world: RestWorld, service: Service) -> None:
    def place() -> None:
        client = SyncHalfway(NOWHERE, "shop", barrier=service.barrier, prepare_timeout_s=0.05)
        wrong = Message(topic="orders", key="k", value="v", partition=99)
        with client, client.transaction([wrong], service.engine.begin, when_away="store"):
            pass

    await asyncio.to_thread(place)
    await asyncio.to_thread(service.place, NOWHERE, "1")
    assert await service.send(world) == 1
    assert "99" in service.barrier.parked()[0].reason


async def test_a_topic_that_the_group_gets_later_is_waited_for(world: RestWorld, service: Service) -> None:
    """A process of the new release registers it when halfway is back, perhaps after another has begun to send."""

    def place() -> None:
        client = SyncHalfway(NOWHERE, "shop", barrier=service.barrier, prepare_timeout_s=0.05)
        new = Message(topic="parcels", key="k", value="v")
        with client, client.transaction([new], service.engine.begin, when_away="store"):
            pass

    await asyncio.to_thread(place)
    await asyncio.to_thread(service.place, NOWHERE, "1", key="other")
    with pytest.raises(InvalidRequestError, match="parcels"):
        await service.send(world)
    assert (sent(world), service.barrier.stored().waiting, service.barrier.parked()) == (["1"], 1, [])
    world.memory.create_topic("parcels")
    await world.put_shop(topics=["orders", "parcels"])
    assert await service.send(world) == 1
    assert [record.value for record in world.memory.records("parcels")] == [b"v"]


async def test_a_row_that_cannot_be_read_is_parked_and_holds_up_nothing(world: RestWorld, service: Service) -> None:
    for order in ("1", "2"):
        await asyncio.to_thread(service.place, NOWHERE, order)
    with service.engine.begin() as connection:
        damage = "UPDATE halfway_barrier_stored SET messages = '[' WHERE messages LIKE '%\"1\"%'"
        connection.exec_driver_sql(damage.replace("%", "%%"))
    assert await service.send(world) == 1
    assert sent(world) == ["2"]
    (parked,) = service.barrier.parked()
    assert (parked.messages, "cannot be read" in parked.reason) == ([], True)


async def test_two_processes_that_send_at_once_send_each_once(world: RestWorld, service: Service) -> None:
    for order in ("1", "2", "3"):
        await asyncio.to_thread(service.place, NOWHERE, order)
    barriers = [Barrier(service.engine.dialect.name, service.engine.begin, store=Store()) for _ in range(3)]
    for one in barriers[1:]:
        one.store._owner = barriers[0].store._owner  # these two have the lease at once, as after a long pause

    async def send(barrier: Barrier) -> None:
        with suppress(Exception):  # SQLite is locked for a moment
            await service.send(world, barrier)

    for _ in range(3):
        await asyncio.gather(*map(send, barriers))
    await service.send(world, barriers[0])
    assert sent(world) == ["1", "2", "3"]


async def test_an_id_that_halfway_refuses_does_not_stay_in_the_way(world: RestWorld, service: Service) -> None:
    """It is of a clock that was ahead, or halfway has other messages under it, which nobody commits."""
    tomorrow, own = transaction_id("1", world.memory.clock.now_ms() + 86_400_000), born_now(world)
    async with Halfway(world.url, "shop") as client:
        await client.prepare([message("another")], id=own)
    await asyncio.to_thread(service.place, NOWHERE, "1", id=tomorrow)
    await asyncio.to_thread(service.place, NOWHERE, "2", id=own)
    assert await service.send(world) == 2
    assert sent(world) == ["1", "2"]
    assert service.barrier.settle(own) == "rollback"


async def test_what_halfway_refuses_again_and_again_holds_up_its_own_key_only(
    world: RestWorld, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if more wait behind it than the sender looks at together."""
    monkeypatch.setattr("halfway.client.barrier.maintenance._WINDOW", 2)
    stuck = await asyncio.to_thread(service.place, NOWHERE, "1", key="stuck")
    for order, key in (("2", "stuck"), ("3", "stuck"), ("4", "k"), ("5", "k")):
        await asyncio.to_thread(service.place, NOWHERE, order, key=key)
    prepare = StoredSender._prepare

    async def refused(self: StoredSender, transaction: StoredTransaction) -> Any:
        return HalfwayError("not now") if transaction.id == stuck else await prepare(self, transaction)

    monkeypatch.setattr(StoredSender, "_prepare", refused)
    with pytest.raises(HalfwayError, match="not now"):
        await service.send(world)
    assert sent(world) == ["4", "5"]
    monkeypatch.setattr(StoredSender, "_prepare", prepare)
    await service.send(world)
    assert sorted(sent(world)) == ["1", "2", "3", "4", "5"]


async def test_those_of_a_busy_key_are_sent_in_one_pass(
    world: RestWorld, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They follow each other by a statement and a commit each; otherwise live orders would be stored faster."""
    for order in range(8):
        await asyncio.to_thread(service.place, NOWHERE, str(order))
    send, passes = StoredSender._send, list[int]()

    async def counted(self: StoredSender, transactions: Any, done: Any) -> None:
        passes.append(len(transactions))
        await send(self, transactions, done)

    monkeypatch.setattr(StoredSender, "_send", counted)
    assert await service.send(world) == 8
    assert (sent(world), passes) == ([str(order) for order in range(8)], [8])
    assert service.barrier.stored().waiting == 0


async def test_many_that_halfway_refuses_do_not_slow_down_the_others(
    world: RestWorld, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard is still being moved: what waits for it is looked at once."""
    monkeypatch.setattr("halfway.client.barrier.maintenance._WINDOW", 3)
    stuck = {await asyncio.to_thread(service.place, NOWHERE, str(order), key=str(order)) for order in (0, 1)}
    for order in range(2, 9):
        await asyncio.to_thread(service.place, NOWHERE, str(order), key=str(order))
    prepare, send, rounds = StoredSender._prepare, StoredSender._send, list[int]()

    async def refused(self: StoredSender, transaction: StoredTransaction) -> Any:
        return HalfwayError("not now") if transaction.id in stuck else await prepare(self, transaction)

    async def counted(self: StoredSender, transactions: Any, done: Any) -> None:
        rounds.append(len(transactions))
        await send(self, transactions, done)

    monkeypatch.setattr(StoredSender, "_prepare", refused)
    monkeypatch.setattr(StoredSender, "_send", counted)
    with pytest.raises(HalfwayError, match="not now"):
        await service.send(world)
    assert rounds == [3, 1, 3, 2]


@pytest.mark.parametrize("checked", [False, True])
async def test_what_was_rolled_back_by_hand_inside_the_block_is_not_stored(service: Service, *, checked: bool) -> None:
    """The barrier's row went with it, and a check may have written another: the messages must not come alone."""

    def place() -> None:
        client = SyncHalfway(NOWHERE, "shop", barrier=service.barrier, prepare_timeout_s=0.05)
        with client, (block := client.transaction([message("1")], service.engine.begin, when_away="store")) as opened:
            opened.exec_driver_sql("ROLLBACK")
            assert not checked or service.barrier.settle(block.id) == "rollback"

    with pytest.raises(NoTransactionError, match="rolled back before its end"):
        await asyncio.to_thread(place)
    assert service.barrier.stored().waiting == 0


async def test_nothing_stored_is_sent_before_older_transactions_are_ended(world: RestWorld, service: Service) -> None:
    """It would overtake one of its key whose end was lost. After five tries it goes on: one may be unable to end.

    What fails while halfway is away is no try.
    """
    is_away = True

    class Refused(Halfway):
        def list_ids(self, **_: Any) -> Any:
            raise HalfwayError("a shard is being taken over")

        async def show_group(self) -> Any:
            if is_away:
                raise HalfwayError("halfway is away")
            return await super().show_group()

    await asyncio.to_thread(service.place, NOWHERE, "1")
    async with Refused(world.url, "shop", barrier=service.barrier) as client:
        one = StoredSender(client, service.barrier)
        for _ in range(9):
            with pytest.raises(HalfwayError, match="away"):
                await one.send()
        is_away = False
        for _ in range(4):
            with pytest.raises(HalfwayError, match="taken over"):
                await one.send()
        assert sent(world) == []
        assert await one.send() == 1
    assert sent(world) == ["1"]


async def test_one_process_sends_at_a_time(world: RestWorld, service: Service) -> None:
    await asyncio.to_thread(service.place, NOWHERE, "1")
    other = Barrier(service.engine.dialect.name, service.engine.begin, store=Store())
    assert other.in_transaction(other.store.oldest("shop", 10))
    assert await service.send(world) == 0
    assert await service.send(world, other) == 1


class DiesError(BaseException):
    """The process dies here."""


class Dying:
    """A client and a barrier that die before or after one of their calls."""

    def __init__(self, client: Halfway, barrier: Barrier, at: int) -> None:
        self.group, self.new_id, self.list_ids = client.group, client.new_id, client.list_ids
        self.store = barrier.store
        self.prepare, self.end = self._dies_around(client.prepare), self._dies_around(client.end)
        self.in_transaction = self._dies_around(barrier.in_transaction)
        self.look = barrier.look
        self.left = at

    def _dies_around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        async def dying(*args: Any, **kwargs: Any) -> Any:
            self._step()
            result = call(*args, **kwargs)
            result = await result if asyncio.iscoroutine(result) else result
            self._step()
            return result

        return dying

    def _step(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise DiesError


@pytest.mark.parametrize("arrived", [True, False])
@pytest.mark.parametrize("later_s", [0, PAST_THE_HORIZON_S])
async def test_a_sender_that_dies_at_any_step_loses_and_doubles_nothing(
    world: RestWorld, service: Service, later_s: float, *, arrived: bool
) -> None:
    """Past the horizon only what died between its commit and its deletion needs a person, who finds it delivered."""
    parked, is_over = 0, False
    for at in range(1, 40):
        own, order = born_now(world), f"{at:02}"
        if arrived:
            async with Halfway(world.url, "shop") as client:
                await client.prepare([message(order)], id=own)
        await asyncio.to_thread(service.place, NOWHERE, order, id=own)
        async with Halfway(world.url, "shop", barrier=service.barrier) as client:
            dying = Dying(client, service.barrier, at)
            is_over = True
            try:
                await StoredSender(dying, dying).send()  # type: ignore[arg-type]
            except DiesError:
                is_over = False
        await pass_time(world, later_s)
        await service.send(world)
        for one in service.barrier.parked():
            parked += 1
            assert sent(world)[-1] == order
            assert service.barrier.resolve(one.id, delivered=True)
        if is_over:
            break
    assert is_over
    assert sent(world) == service.orders()
    assert parked == (2 if later_s else 0)
    assert service.barrier.stored().waiting == 0


async def test_a_full_store_refuses_an_order_before_it_runs(world: RestWorld, engine: Engine) -> None:
    service = Service(engine, Store(max_rows=1))
    await asyncio.to_thread(service.place, NOWHERE, "1")
    with pytest.raises(StoreFullError, match="max_rows"):
        await asyncio.to_thread(service.place, NOWHERE, "2")
    assert service.orders() == ["1"]
    await service.send(world)
    await asyncio.to_thread(service.place, world.url, "2")
    assert sent(world) == ["1", "2"]


async def test_a_session_stores_with_its_commit(world: RestWorld, service: Service) -> None:
    def work() -> None:
        with SyncHalfway(NOWHERE, "shop", barrier=service.barrier, prepare_timeout_s=0.05) as client:
            producer = SessionProducer(client, when_away="store")
            for order in ("1", "2"):
                with Session(service.engine) as session, session.begin():
                    insert(session.connection(), order)
                    producer.send(session, "orders", "k", {"order": order})
                with suppress(LookupError), Session(service.engine) as session, session.begin():
                    producer.send(session, "orders", "k", {"order": "never"})
                    raise LookupError

    await asyncio.to_thread(work)
    assert await service.send(world) == 2
    assert sent(world) == service.orders() == ["1", "2"]


async def test_asynchronous_drivers_store_too(world: RestWorld, service: Service) -> None:
    """A block of asyncpg or asyncmy, and a session."""
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "mysql": "mysql+asyncmy"}
    if service.engine.dialect.name == "sqlite":
        return
    driver = drivers[service.engine.dialect.name]
    engine = create_async_engine(service.engine.url.set(drivername=driver), poolclass=NullPool)
    barrier = AsyncBarrier(engine.dialect.name, engine.begin, store=Store())
    async with Halfway(NOWHERE, "shop", barrier=barrier, prepare_timeout_s=0.05) as client:
        async with client.transaction([message("1")], engine.begin, when_away="store") as connection:
            await connection.run_sync(insert, "1")
        producer = AsyncSessionProducer(client, when_away="store")
        async with engine.begin() as connection:
            await connection.run_sync(insert, "2")
            await producer.send(connection, "orders", "k", {"order": "2"})
        assert (await barrier.stored()).waiting == 2
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        assert await StoredSender(client, barrier).send() == 2
    await engine.dispose()
    assert sent(world) == service.orders() == ["1", "2"]


async def test_a_service_that_does_not_store_still_fails(service: Service) -> None:
    """The default, and a client whose barrier has no store."""
    client = SyncHalfway(NOWHERE, "shop", barrier=service.barrier, prepare_timeout_s=0.05)
    with client, pytest.raises(PrepareUnconfirmedError), client.transaction([message("1")], service.engine.begin):
        pytest.fail("ran")
    plain = Barrier(service.engine.dialect.name, service.engine.begin)
    with SyncHalfway(NOWHERE, "shop", barrier=plain) as client:
        with pytest.raises(NoStoreError, match="store=Store"):
            client.transaction([message("1")], service.engine.begin, when_away="store")
        with pytest.raises(TypeError, match="give `begin`"):
            client.transaction([message("1")], when_away="store")  # type: ignore[call-overload]


async def test_a_check_of_a_process_without_a_store_is_answered_alike(world: RestWorld, service: Service) -> None:
    """Otherwise it would commit what the sender may send under another id."""
    own = await asyncio.to_thread(service.place, NOWHERE, "1")
    plain = Barrier(service.engine.dialect.name, service.engine.begin)
    assert plain.look(own) == "unknown"
    await service.send(world)
    assert plain.look(own) == "commit"
    async with Halfway(world.url, "shop") as client:
        with pytest.raises(AlreadyEndedError):
            await client.end(own, "rollback")


async def test_a_service_starts_while_halfway_is_away(service: Service) -> None:
    """It takes orders; the group is registered, and the orders are sent, when halfway is back."""
    port = pick_port()
    opened = SyncHalfway(f"http://{HOST}:{port}", "new-shop", barrier=service.barrier, prepare_timeout_s=0.05)

    def work() -> None:
        assert opened.start(topics=["orders"], timeout_s=0.05) == {}
        with opened.transaction([message("1")], service.engine.begin, when_away="store") as connection:
            insert(connection, "1")

    with opened:
        await asyncio.to_thread(work)
        assert service.barrier.stored().waiting == 1
        async with RestWorld(port=port) as world:
            await until_true(lambda: sent(world) == ["1"])


def test_a_service_without_a_store_does_not_start_while_halfway_is_away(service: Service) -> None:
    """It could take no orders."""
    plain = Barrier(service.engine.dialect.name, service.engine.begin)
    with SyncHalfway(NOWHERE, "shop", barrier=plain) as client, pytest.raises(UnavailableError):
        client.start(topics=["orders"], timeout_s=0.05)
