"""The conformance of a service in any language, with a real coordinator, a real broker and a real PostgreSQL.

`HALFWAY_TEST_SERVICE=COMMAND` runs it for a service of your own; examples/services/README.md has the contract.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psycopg
import pytest
from standardwebhooks import Webhook

from halfway.client import transaction_id
from halfway.protocol.keys import RANDOM_BYTES, key_text
from halfway.protocol.principal import PrincipalKind
from tests.support.brokers.fixtures import Kafka
from tests.support.conformance.crossings import PLACES, Crossings, Gate, crossings
from tests.support.conformance.services import ServiceProcess, build, languages
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.rest_client import QUIET, Rest
from tests.support.coordinator.topics import Cluster
from tests.support.databases.servers import USER, Server
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.timeout(1800),  # a new machine compiles Go's standard library first
    pytest.mark.xdist_group("conformance"),
]
OPERATOR = key_text(PrincipalKind.OPERATOR, bytes(range(RANDOM_BYTES)))
SETTINGS = {
    "HALFWAY_MASTER_SECRET": "the master secret of this test, which is long enough",
    "HALFWAY_OPERATOR_KEY": OPERATOR,
    "HALFWAY_OPEN_ACCESS": "false",
}
COMMITTED_AT = ("after the commit", "before the end", "after the end")
"""The places at which the order is in the database."""
NOT_HALFWAYS = "v1,bm90IGEgc2lnbmF0dXJlIG9mIGhhbGZ3YXksIGJ1dCBsb25n"


class Scene:
    """A service in one language, with a coordinator and a database that can lose answers."""

    def __init__(
        self,
        rest: Rest,
        cluster: Cluster,
        places: Crossings,
        service: ServiceProcess,
        database: str,
        *,
        topic: str,
        group: str,
    ) -> None:
        self.places = places
        self.service = service
        self.at = int(datetime.now(UTC).timestamp() * 1000)
        self.secret = ""
        self._rest = rest
        self._cluster = cluster
        self._database = database
        self._topic = topic
        self._group = group
        self._ids: set[str] = set()

    async def order(self, order: str) -> int:
        """Place an order, and return the status; 0 if the service died."""
        self._ids.add(self._id_of(order))
        try:
            body = {"id": order, "total": 9.5, "at": self.at}
            async with self._rest.session.post(f"{self.service.url}/orders", json=body) as answer:
                return answer.status
        except aiohttp.ClientConnectionError:
            return 0

    async def check(self, order: str, *, age: timedelta = timedelta(0), **headers: str) -> str:
        """Ask as halfway does, but for these headers; return the outcome, or the status if the answer is not 200."""
        sent = datetime.now(UTC)
        prepared_at = (sent - age).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        question = {
            "type": "transaction.check",
            "nonce": f"nonce of {order}",
            "id": self._id_of(order),
            "group": "shop",
        }
        body = json.dumps({**question, "group": "shop", "prepared_at": prepared_at, "attempt": 1, "messages": []})
        signed = {
            "webhook-id": "msg_1",
            "webhook-timestamp": str(int(sent.timestamp())),
            # As during a rotation of the master secret.
            "webhook-signature": f"{NOT_HALFWAYS} {Webhook(self.secret).sign('msg_1', sent, body)}",
            "Content-Type": "application/json",
        }
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"{self.service.url}/check"
        async with self._rest.session.post(url, data=body, headers=signed | headers) as answer:
            if answer.status != 200:
                return str(answer.status)
            assert answer.content_type == "application/json"
            told = await answer.json()
        assert told["nonce"] == question["nonce"]
        return str(told["outcome"])

    async def decided(self, order: str) -> str:
        """Check again as long as the answer is unknown: a service may not know it in time."""
        return await eventually(partial(self.check, order), lambda outcome: outcome != "unknown")

    async def placed(self, order: str) -> int:
        """Place an order again as long as its outcome is not known."""
        return await eventually(partial(self.order, order), lambda status: status != 503)

    async def park_after_one_check(self) -> None:
        answer = await self._rest.call("PATCH", f"/groups/{self._group}", {"policy": {"max_checks": 1}})
        answer.expect(200)

    async def parked(self, order: str) -> None:
        """Let halfway check an order until its transaction is parked."""
        transaction = self._id_of(order)
        await self._rest.check(transaction)

        async def state() -> object:
            return (await self._rest.get(transaction)).expect(200)["state"]

        await eventually(state, lambda found: found == "parked")

    async def resume(self, order: str) -> None:
        (await self._rest.resume(self._id_of(order))).expect(200)
        await self.decided(order)

    def execute(self, sql: str) -> list[Any]:
        """Run a statement past the proxy, and return the first column of its rows."""
        with psycopg.connect(self._database) as connection:
            cursor = connection.execute(sql.encode())
            return [row[0] for row in cursor] if cursor.description else []

    async def settled(self) -> list[str]:
        """Wait until every transaction has ended, demand that orders and messages agree, and return the orders."""
        for each in self._ids:
            await eventually(partial(self._state, each), lambda state: state != "prepared")
        records = await self._cluster.read(self._topic)
        sent = Counter(json.loads(record.value or b"")["order"] for record in records)
        assert sent == Counter(self.execute("SELECT id FROM orders"))
        assert max(sent.values(), default=1) == 1
        return sorted(sent)

    async def _state(self, transaction: str) -> str:
        answer = await self._rest.get(transaction)
        if answer.status == 404:
            return "never prepared"
        if (state := str(answer.expect(200)["state"])) == "prepared":
            await self._rest.check(transaction)
        assert state != "parked"
        return state

    def _id_of(self, order: str) -> str:
        return transaction_id(f"shop/order/{order}", self.at)


@pytest.fixture(scope="module", params=languages())
def command(request: pytest.FixtureRequest) -> list[str]:
    return build(request.param)


@pytest.fixture(scope="module")
def signing(kafka: Kafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    coordinator = CoordinatorProcess(kafka.bootstrap_servers, tmp_path_factory.mktemp("signing"), SETTINGS).start()
    yield coordinator
    coordinator.close()


@pytest.fixture
async def scene(
    command: list[str],
    signing: CoordinatorProcess,
    cluster: Cluster,
    topic: str,
    group: str,
    postgresql_server: Server,
    tmp_path: Path,
) -> AsyncIterator[Scene]:
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {OPERATOR}"}, connector=connector) as session,
        crossings(signing.url, postgresql_server.folder / ".s.PGSQL.5432") as places,
    ):
        with postgresql_server.new_database("postgresql") as database:
            rest = Rest(session, signing.url, signing.health_url)
            (await rest.put_group(group, topics=[topic], policy={**QUIET, "max_checks": 1000})).expect(201)
            key = (await rest.call("POST", "/keys", {"kind": "group", "name": group})).expect(201)["key"]
            proxied = f"postgresql://{USER}@127.0.0.1:{places.database_port}{urlsplit(database).path}?sslmode=disable"
            settings = {"HALFWAY_URL": places.halfway_url, "HALFWAY_KEY": key, "DATABASE_URL": proxied}
            service = ServiceProcess(command, {**settings, "GROUP": group, "TOPIC": topic}, tmp_path / "service.log")
            scene = Scene(rest, cluster, places, service, database, topic=topic, group=group)
            url, headers = f"{signing.url}/v1/groups/{group}/check-secrets", {"Authorization": f"Bearer {key}"}
            async with session.get(url, headers=headers) as answer:
                scene.secret = (await answer.json())["secrets"][0]
            try:
                await asyncio.to_thread(service.start)
                yield scene
            finally:
                service.kill()
                print(service.log.read_text()[-8_000:])  # noqa: T201 - pytest shows it with a failure


async def test_an_order_and_its_message_stay_together_wherever_an_answer_is_lost(scene: Scene) -> None:
    """The service repeats what halfway may not have heard, and asks its barrier what became of a lost commit."""
    assert await scene.order("größe/7") == 201
    for place in PLACES:
        gate = scene.places.gate(place, cuts=True)
        status = await scene.order(place)
        assert gate.reached.is_set()
        assert "commit" in place or status == 201
    assert await scene.settled() == sorted(["größe/7", *PLACES[:2], *COMMITTED_AT])


async def test_a_service_that_is_killed_at_any_step_ends_its_transaction_when_it_is_back(scene: Scene) -> None:
    """It deletes the barrier's old rows too, and no young ones."""
    scene.execute(
        "INSERT INTO halfway_barrier (transaction_id, outcome, decided_at)"
        " VALUES ('old', 'commit', now() - interval '8 days'), ('young', 'commit', now() - interval '6 days')"
    )
    for place in PLACES:
        gate = scene.places.gate(place)
        placing = asyncio.create_task(scene.order(place))
        await _reached(gate, placing)
        scene.service.kill()
        gate.cut()
        assert await placing == 0
        await asyncio.to_thread(scene.service.start)
    assert await scene.settled() == sorted(COMMITTED_AT)
    assert scene.execute("SELECT transaction_id FROM halfway_barrier WHERE transaction_id IN ('old', 'young')") == [
        "young"
    ]


async def test_the_first_decision_about_an_order_wins(scene: Scene) -> None:
    """A check or the local transaction, one caller or the other; a check of an open one is answered without waiting."""
    assert await scene.decided("late") == "rollback"
    assert await scene.placed("late") == 409

    gate = scene.places.gate("before the commit")
    placing = asyncio.create_task(scene.order("open"))
    await _reached(gate, placing)
    assert await scene.check("open") == "unknown"
    beside = asyncio.create_task(scene.placed("open"))
    gate.release()
    assert await placing == 201
    assert await beside in {200, 201}
    assert [await scene.decided("open"), await scene.decided("open")] == ["commit", "commit"]
    assert await scene.placed("open") == 200

    scene.at += 1
    assert await scene.placed("open") == 409  # its number is taken
    assert await scene.settled() == ["open"]
    assert await scene.check("forgotten", age=timedelta(days=4)) == "unknown"
    assert await scene.decided("forgotten") == "rollback"


async def test_an_order_whose_transaction_is_parked_is_not_placed_again(scene: Scene) -> None:
    """Its outcome is not known: it may be in the database or not. An end resolves it, or an operator resumes it."""
    await scene.park_after_one_check()
    gate = scene.places.gate("before the commit")
    placing = asyncio.create_task(scene.order("parked"))
    await _reached(gate, placing)
    await scene.parked("parked")
    assert await scene.order("parked") == 503
    gate.release()
    if await placing == 503:  # a slow machine: the service has given up the commit
        await scene.resume("parked")
    assert await scene.placed("parked") == 200
    assert await scene.settled() == ["parked"]


async def test_an_order_has_the_same_message_after_a_restart(scene: Scene) -> None:
    """Byte for byte, so that halfway takes it for the same. One that is refused is not decided."""
    assert await scene.order("too long: " * 90_000) == 503
    assert scene.execute("SELECT transaction_id FROM halfway_barrier WHERE transaction_id NOT LIKE '#%'") == []
    assert await scene.order("again") == 201
    for _ in range(3):
        scene.service.kill()
        await asyncio.to_thread(scene.service.start)
        assert await scene.order("again") == 200
    assert await scene.settled() == ["again"]


async def test_only_a_check_that_halfway_has_signed_lately_is_answered(scene: Scene) -> None:
    """Anything else is 401, and nothing is written for it."""
    assert await scene.check("forged", webhook_id="msg_2") == "401"
    assert await scene.check("forged", webhook_timestamp=str(int(datetime.now(UTC).timestamp()) - 600)) == "401"
    for signature in (NOT_HALFWAYS, "v1,%", ""):
        assert await scene.check("forged", webhook_signature=signature) == "401"
    assert scene.execute("SELECT transaction_id FROM halfway_barrier WHERE transaction_id NOT LIKE '#%'") == []
    assert await scene.decided("forged") == "rollback"


async def _reached(gate: Gate, placing: asyncio.Task[int]) -> None:
    reached = asyncio.create_task(gate.reached.wait())
    await asyncio.wait({reached, placing}, return_when=asyncio.FIRST_COMPLETED)
    assert reached.done(), f"{gate.place} was not reached: {placing.result()}"
