"""Services as they are deployed: several processes, forked or not, and two releases of one service."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sqlalchemy import NullPool, create_engine

from halfway.embedded.broker import pick_port
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.rest_client import Rest
from tests.support.coordinator.topics import Cluster
from tests.support.databases.servers import Server
from tests.support.service.deployed import KILLED, queue
from tests.support.waiting import GENEROUS_S, eventually, until_true

pytestmark = pytest.mark.xdist_group("databases")

APP = "tests.support.service.deployed"
WORKERS = 8
ROOT = Path(__file__).parents[3]


class Deployment:
    """What the processes of a service share: its database, its group, and one topic for each of two releases."""

    def __init__(self, url: str, group: str, database: str, topics: tuple[str, ...], folder: Path) -> None:
        self.topics = topics
        self.folder = folder
        self.log = folder / "log"
        self.release_file = folder / "release"
        self.release_file.write_text("0")
        self.placed: list[str] = []
        self.answers: list[str] = []
        """The release and the process of each order."""
        blocking = database.replace("asyncmy", "pymysql").replace("asyncpg", "psycopg")
        self._engine = create_engine(blocking, poolclass=NullPool)
        self._environment = {
            "HALFWAY_URL": url,
            "GROUP": group,
            "TOPICS": " ".join(topics),
            "DATABASE_URL": database,
            "RELEASE_FILE": str(self.release_file),
            "QUEUE": str(folder / "queue"),
        }
        with self._engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE orders (id varchar(40) PRIMARY KEY)")

    @contextmanager
    def running(self, *command: str, **environment: str) -> "Iterator[subprocess.Popen[bytes]]":
        """Run a module, which ends by itself when it is asked to (SIGTERM)."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", *command],  # of util-linux
                cwd=ROOT,
                env={**os.environ, **self._environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(GENEROUS_S) in {0, -signal.SIGTERM}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    async def place(self, session: aiohttp.ClientSession, port: int) -> None:
        """Place an order; every one of them must be taken."""
        order = f"order {len(self.placed)}"
        self.placed.append(order)
        async with session.post(f"http://127.0.0.1:{port}/orders/{order}") as answer:
            assert answer.status == 201, await answer.text()
            self.answers.append((await answer.text()).strip('"'))

    @asynccontextmanager
    async def placing(self, *ports: int) -> AsyncIterator[None]:
        """Place orders all the time, at all ports."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            leaving = asyncio.Event()

            async def caller(port: int) -> None:
                while not leaving.is_set():
                    await self.place(session, port)

            callers = [asyncio.create_task(caller(port)) for port in ports for _ in range(4)]
            try:
                yield
            finally:
                leaving.set()
                await asyncio.gather(*callers)

    async def listening(self, port: int) -> None:
        async def connected() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                return False
            writer.close()
            return True

        await eventually(connected, bool)

    async def demand_each_once(self, cluster: Cluster) -> None:
        """Demand that orders and messages are what was placed."""
        sent = Counter((record.key or b"").decode() for record in await cluster.read(*self.topics))
        with self._engine.begin() as connection:
            orders = [str(row[0]) for row in connection.exec_driver_sql("SELECT id FROM orders")]
        assert sent == Counter(orders) == Counter(self.placed)


@pytest.fixture
async def deploy(
    coordinator: CoordinatorProcess, cluster: Cluster, group: str, servers: dict[str, Server], tmp_path: Path
) -> AsyncIterator[Any]:
    topics = await cluster.make_topics("first", "second")
    with contextlib.ExitStack() as stack:

        def deployment(driver: str) -> Deployment:
            database = stack.enter_context(servers[driver.partition("+")[0]].new_database(driver))
            made = Deployment(coordinator.url, group, database, topics, tmp_path)
            stack.callback(lambda: print(made.log.read_text()[-8_000:]))  # noqa: T201 - shown with a failure
            return made

        yield deployment


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "mysql+pymysql"])
async def test_eight_workers_of_gunicorn_take_a_new_release_while_orders_come(
    deploy: Any, driver: str, cluster: Cluster
) -> None:
    """Each makes sure of the table and registers the group at its start; those of the old release work to the end."""
    service: Deployment = deploy(driver)
    port = pick_port()
    # As its configuration, gunicorn imports the service's module once for all workers; each makes its own application.
    options = ("-c", f"python:{APP}", "-w", str(WORKERS), "-b", f"127.0.0.1:{port}", "-t", str(round(GENEROUS_S)))
    with service.running("gunicorn", *options, f"{APP}:wsgi()") as gunicorn:
        await service.listening(port)
        async with service.placing(port, port):
            await until_true(lambda: len(set(service.answers)) >= WORKERS, what="an answer of each worker")
            service.release_file.write_text("1")
            gunicorn.send_signal(signal.SIGHUP)
            await until_true(lambda: len(set(service.answers)) >= 2 * WORKERS, what="an answer of each new worker")
    await service.demand_each_once(cluster)


@pytest.mark.parametrize("driver", ["postgresql+asyncpg", "mysql+asyncmy"])
async def test_two_releases_of_uvicorn_serve_beside_each_other(
    deploy: Any, driver: str, cluster: Cluster, rest: Rest, group: str
) -> None:
    """The group has the topics of both; a check reaches the endpoint that the application has joined."""
    service: Deployment = deploy(driver)
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        ports: list[int] = []
        for number, stack in enumerate((first, second)):
            service.release_file.write_text(str(number))
            port = pick_port(set(ports))
            ports.append(port)
            url = f"http://127.0.0.1:{port}/check"
            command = ("uvicorn", "--factory", f"{APP}:asgi", "--port", str(port))
            stack.enter_context(service.running(*command, CHECK_URL=url))
            await service.listening(port)
        async with service.placing(*ports):
            await until_true(lambda: len(set(service.answers)) == 2, what="an answer of each release")
        first.close()
        async with service.placing(ports[1]):
            pass
        never = await rest.prepared(group, [{"topic": service.topics[0], "key": "never", "value": "x"}])
        await rest.check(never)
        await eventually(lambda: rest.get(never), lambda told: told.expect(200)["state"] == "rolled_back")
    await service.demand_each_once(cluster)


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "mysql+pymysql"])
async def test_the_forked_processes_of_celery_use_the_client_of_their_parent(
    deploy: Any, driver: str, cluster: Cluster, rest: Rest, group: str
) -> None:
    """The parent answers the checks of one that was killed."""
    service: Deployment = deploy(driver)
    sender = queue(service.folder / "queue")
    with service.running("celery", "-A", f"{APP}:celery_app", "worker", "-c", "4", "-l", "INFO", "--without-mingle"):
        sender.send_task("place", [KILLED])
        for number in range(20):
            service.placed.append(f"order {number}")
            sender.send_task("place", [service.placed[-1]])

        def done() -> list[str]:
            return re.findall(r"Task place\S+ succeeded in \S+ '(0 \d+)'", service.log.read_text())

        await until_true(lambda: len(done()) == len(service.placed), what="all orders")
        assert len(set(done())) > 1
        assert len(await eventually(lambda: _states(rest, group, "rolled_back"), bool)) == 1
        assert await _states(rest, group, "prepared") == []
    sender.close()
    await service.demand_each_once(cluster)


async def _states(rest: Rest, group: str, state: str) -> list[object]:
    told = await rest.call("GET", "/transactions", query={"group": group, "state": state})
    return list(told.expect(200)["transactions"])
