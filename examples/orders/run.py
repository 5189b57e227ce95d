"""The order story against a real Kafka: `make demo`.

Exit status 0 when the order database, the topics and halfway agree in the end, 1 when they do not.
"""

import argparse
import asyncio
import json
import logging
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.orders.consumers import Department, Seen, read
from examples.orders.judge import Evidence, judge
from examples.orders.network import LossyNetwork
from examples.orders.plan import Fault, Planned, plan
from examples.orders.processes import DemoError, HalfwayDev, OrderServiceProcess
from examples.orders.recorder import Recorder
from examples.orders.report import Progress, summary, tables
from examples.orders.service import POLICIES, TOPICS
from halfway.client.barrier import sqlite_transactions

DEAD_LETTERS = "dead-letters"
CUSTOMERS = 12
PARTITIONS = 2
TRIES_PER_FAULT = 5
SERVED_WITHIN_S = 60.0
REST_WITHIN_S = 90.0
READ_WITHIN_S = 30.0


class Demo:
    """One run: its parts, and the steps in their order."""

    def __init__(
        self,
        orders: Sequence[Planned],
        stack: AsyncExitStack,
        directory: Path,
        progress: Progress,
        recorder: Recorder,
    ) -> None:
        """Keep the plan; everything that is started goes onto the stack, which stops it."""
        self._orders = list(orders)
        self._faults = {order.id: order.fault for order in orders}
        self._stack = stack
        self._directory = directory
        self._progress = progress
        self._recorder = recorder
        self.departments: list[Department] = []

    async def tell(self) -> Evidence:
        """Go through the whole story and return what is found at its end."""
        await self.start()
        watch = asyncio.create_task(self._progress.watch(self))
        self._stack.callback(watch.cancel)
        self._progress.say("orders come in")
        await self.order()
        self._progress.say("halfway asks what became of the rest")
        await self.come_to_rest()
        self._progress.say("the departments read to the end")
        await self.read_to_the_ends()
        return await self.evidence()

    async def start(self) -> None:
        """Start Kafka and halfway, the network, the consumers and the order service."""
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
        self._session = await self._stack.enter_async_context(session)
        topics = [f"{topic}:{PARTITIONS}" for topic in TOPICS] + [DEAD_LETTERS]
        self.halfway = await self._stack.enter_async_context(HalfwayDev(self._directory, topics))
        await self.halfway.ask_for_keys()
        await self.halfway.ready(self._progress.say)
        self.service = OrderServiceProcess(self._directory, self._session)
        network = LossyNetwork(self.halfway.url, self._faults, self.service.kill_and_restart, self._recorder)
        self.network = await self._stack.enter_async_context(network)
        await self._stack.enter_async_context(self.service)
        self._progress.say("the order service and the departments start")
        check_url = f"{self.service.url}/check"
        keys = {group: await self.halfway.admit(group, check_url, TOPICS) for group in POLICIES}
        await self.service.serve(self.network.url, keys)
        self._stack.push_async_callback(self._stop_departments)
        begin = sqlite_transactions(self._directory / "departments.sqlite")
        self.departments = [Department(self._bootstrap_servers, topic, begin, DEAD_LETTERS) for topic in TOPICS]
        for department in self.departments:
            department.start()

    @property
    def _bootstrap_servers(self) -> str:
        return self.halfway.bootstrap_servers

    async def _stop_departments(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(department.stop) for department in self.departments))

    async def order(self) -> None:
        """Place every order, a dozen customers at a time, and again alone what should have gone wrong and did not."""
        waiting = iter(tuple(self._orders))

        async def customer() -> None:
            for order in waiting:
                await self._place(order)
                self._progress.placed()

        try:
            async with asyncio.TaskGroup() as customers:
                for _ in range(CUSTOMERS):
                    customers.create_task(customer())
        except* DemoError as failures:
            raise failures.exceptions[0] from None
        for _ in range(TRIES_PER_FAULT):
            for fault in set(self._faults.values()) - {Fault.NONE} - self.network.happened.keys():
                await self._place_again(fault)

    async def _place_again(self, fault: Fault) -> None:
        """Place one more order with a fault of which each order was cut short, by the kill of another or by a check."""
        order = next(order for order in self._orders if order.fault is fault)
        order = replace(order, id=f"{order.id[:-4]}{len(self._orders) + 1:04}")
        self._orders.append(order)
        self._faults[order.id] = fault
        await self._place(order)

    async def _place(self, order: Planned) -> None:
        deadline = time.monotonic() + SERVED_WITHIN_S
        while time.monotonic() < deadline:
            try:
                await self.service.post("/orders", order.body)
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.2)  # the service is down: the order was not sent yet
            except (aiohttp.ClientError, TimeoutError):
                return  # the customer never learns what became of it
            else:
                return
        raise self.service.failed("the order service did not come back")

    async def come_to_rest(self) -> None:
        """Wait until nothing is pending; an operator ends what is parked. Past the time, the judge sees the rest."""
        deadline = time.monotonic() + REST_WITHIN_S
        while time.monotonic() < deadline:
            parked = await self.transactions("parked")
            for found in parked:
                await self._end_as_operator(found["id"])
            prepared = await self.transactions("prepared")
            self._progress.pending(len(prepared) + len(parked))
            if not prepared and not parked:
                return
            await asyncio.sleep(0.5)

    async def _end_as_operator(self, order: str) -> None:
        """Ask the bank, note it in the order service, then end the transaction by that."""
        paid = int(order[-4:]) % 2 == 0
        _, answer = await self.service.post(f"/orders/{order}/settle", {"paid": paid})
        self._progress.say(f"an operator ends {order}: {answer['outcome']}")
        self._recorder.operator_ends(order, answer["outcome"])
        await self.halfway.end_as_operator(order, answer["outcome"])

    async def transactions(self, state: str) -> list[dict[str, Any]]:
        """Return all of halfway's transactions in a state."""
        found: list[dict[str, Any]] = []
        query = {"state": state, "limit": "1000"}
        while True:
            url, shown = f"{self.halfway.url}/v1/transactions", {"Authorization": f"Bearer {self.halfway.operator_key}"}
            async with self._session.get(url, params=query, headers=shown) as response:
                response.raise_for_status()
                page = await response.json()
            found += page["transactions"]
            if page["next"] is None:
                return found
            query["cursor"] = page["next"]

    async def read_to_the_ends(self) -> None:
        """Wait until the departments have digested each message or set it aside. Past the time, the judge sees it."""
        deadline = time.monotonic() + READ_WITHIN_S
        wanted = {topic: {seen.order for seen in await self._read(topic)} for topic in TOPICS}
        while True:
            dead = await self._read(DEAD_LETTERS)
            done = {
                department.topic: {*department.effects()}
                | {seen.order for seen in dead if seen.dead_letter_of == department.topic}
                for department in self.departments
            }
            for department in self.departments:
                if department.error is not None:
                    raise DemoError(f"the consumer of {department.topic} failed: {department.error}")
            if done == wanted or time.monotonic() > deadline:
                return
            await asyncio.sleep(0.2)

    async def _read(self, topic: str) -> list[Seen]:
        return await asyncio.to_thread(read, self._bootstrap_servers, topic)

    async def evidence(self) -> Evidence:
        """Gather what the database, the topics and halfway say."""
        states = ("prepared", "parked", "committed", "rolled_back")
        transactions = [found for state in states for found in await self.transactions(state)]
        with sqlite3.connect(f"file:{self.service.database}?mode=ro", uri=True) as database:
            orders = dict(database.execute("SELECT id, state FROM orders"))
            fenced = {
                row[0]
                for row in database.execute("SELECT transaction_id FROM halfway_barrier WHERE outcome = 'rollback'")
            }
        database.close()
        dead: dict[str, list[str]] = {topic: [] for topic in TOPICS}
        for letter in await self._read(DEAD_LETTERS):
            dead.setdefault(letter.dead_letter_of, []).append(letter.order)
        return Evidence(
            sent={order.id for order in self._orders},
            orders=orders,
            fenced=fenced,
            seen={topic: [seen.order for seen in await self._read(topic)] for topic in TOPICS},
            effects={department.topic: department.effects() for department in self.departments},
            dead=dead,
            flawed={topic: {order.id for order in self._orders if order.flaw == topic} for topic in TOPICS},
            transactions=transactions,
        )


async def run(orders: Sequence[Planned], seed: int, console: Console) -> dict[str, Any]:
    """Run the story and return its summary; the directory with the logs stays where it went wrong."""
    began = time.monotonic()
    progress = Progress(console, len(orders))
    directory = Path(tempfile.mkdtemp(prefix="halfway-demo-"))
    logging.basicConfig(filename=directory / "departments.log", force=True)
    console.print(f"{len(orders)} orders, seed {seed}; logs in {directory} while it runs", highlight=False)
    try:
        async with AsyncExitStack() as stack:
            stack.enter_context(progress)
            recorder = Recorder(directory / "history.jsonl", seed)
            stack.callback(recorder.close)
            demo = Demo(orders, stack, directory, progress, recorder)
            evidence = await demo.tell()
            progress.say("the checker reads the topics")
            bootstrap = demo.halfway.bootstrap_servers
            found = await asyncio.to_thread(recorder.judge, bootstrap, evidence.orders, evidence.fenced)
            progress.say("everything is being stopped")
    except asyncio.CancelledError:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    took = round(time.monotonic() - began, 1)
    problems = judge(evidence) + found
    happened, kills = demo.network.happened, demo.service.kills
    tables(console, evidence, problems, happened, kills)
    console.print(f"{took} s" + (f"; the logs are kept in {directory}" if problems else ""), highlight=False)
    if not problems:
        shutil.rmtree(directory, ignore_errors=True)
    return {**summary(evidence, problems, happened, kills), "seed": seed, "seconds": took}


async def _stoppable(orders: Sequence[Planned], seed: int, console: Console) -> dict[str, Any]:
    """Run as `run` does; the first signal stops everything in its turn, and further ones do not disturb that."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop() -> None:
        for number in signals:
            loop.add_signal_handler(number, lambda: None)
        if task is not None:
            task.cancel()

    for number in signals:
        loop.add_signal_handler(number, stop)
    return await run(orders, seed, console)


def main() -> int:
    """Run the demo and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", type=int, default=300, help="how many (default 300)")
    parser.add_argument("--seed", type=int, default=None, help="the same seed plans the same orders and faults")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON; the rest goes to stderr")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    console = Console(stderr=given.json)
    try:
        result = asyncio.run(_stoppable(plan(given.orders, seed), seed, console))
    except asyncio.CancelledError:
        console.print("stopped")
        return 130
    except DemoError as error:
        console.print(f"the demo failed: {error}", style="red", markup=False, highlight=False)
        return 1
    if given.json:
        print(json.dumps(result))
    return 0 if result["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
