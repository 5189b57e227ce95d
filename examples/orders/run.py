"""Runs the order story against a real Kafka: `make demo`.

The exit status is 0 if the order database, the topics and halfway agree at the end, and 1 if they do not.
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

from examples.orders.consumers import Department, TopicMessage, read
from examples.orders.judge import Evidence, judge
from examples.orders.network import LossyNetwork
from examples.orders.plan import Fault, Planned, order_id, plan
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
    """One run: its parts, and its steps in order."""

    def __init__(
        self,
        orders: Sequence[Planned],
        stack: AsyncExitStack,
        directory: Path,
        progress: Progress,
        recorder: Recorder,
    ) -> None:
        """Take the plan. The stack stops everything that is started."""
        self._orders = list(orders)
        self._faults = {order.id: order.fault for order in orders}
        self._stack = stack
        self._directory = directory
        self._progress = progress
        self._recorder = recorder
        self.departments: list[Department] = []

    async def run(self) -> Evidence:
        """Run the whole story, and return its evidence."""
        await self.start()
        watch = asyncio.create_task(self._progress.watch(self))
        self._stack.callback(watch.cancel)
        self._progress.show_step("customers place orders")
        await self.order()
        self._progress.show_step("halfway checks the open transactions")
        await self.wait_for_outcomes()
        self._progress.show_step("the departments read to the end")
        await self.wait_for_departments()
        return await self.evidence()

    async def start(self) -> None:
        """Start Kafka and halfway, the network, the consumers and the order service."""
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
        self._session = await self._stack.enter_async_context(session)
        topics = [f"{topic}:{PARTITIONS}" for topic in TOPICS] + [DEAD_LETTERS]
        self.halfway = await self._stack.enter_async_context(HalfwayDev(self._directory, topics))
        await self.halfway.require_keys()
        await self.halfway.ready(self._progress.show_step)
        self.service = OrderServiceProcess(self._directory, self._session)
        network = LossyNetwork(self.halfway.url, self._faults, self.service.kill_and_restart, self._recorder)
        self.network = await self._stack.enter_async_context(network)
        await self._stack.enter_async_context(self.service)
        self._progress.show_step("the order service and the departments start")
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
        """Place all orders, a dozen customers at a time; then more orders for faults that did not happen."""
        remaining = iter(tuple(self._orders))

        async def customer() -> None:
            for order in remaining:
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
        """Place another order with a fault that did not happen: a kill or a check interfered with its orders."""
        order = next(order for order in self._orders if order.fault is fault)
        order = replace(order, id=order_id(order.id, len(self._orders) + 1))
        self._orders.append(order)
        self._faults[order.id] = fault
        await self._place(order)

    async def _place(self, order: Planned) -> None:
        deadline = time.monotonic() + SERVED_WITHIN_S
        while time.monotonic() < deadline:
            try:
                await self.service.post("/orders", order.body)
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.2)  # the service is down, so the order was not sent yet
            except (aiohttp.ClientError, TimeoutError):
                return  # the customer never gets an answer
            else:
                return
        raise self.service.failed("the order service did not restart")

    async def wait_for_outcomes(self) -> None:
        """Wait until nothing is pending; an operator ends parked transactions. After the time limit, judge the rest."""
        deadline = time.monotonic() + REST_WITHIN_S
        while time.monotonic() < deadline:
            parked = await self.transactions("parked")
            for transaction in parked:
                await self._end_as_operator(transaction["id"])
            prepared = await self.transactions("prepared")
            self._progress.pending(len(prepared) + len(parked))
            if not prepared and not parked:
                return
            await asyncio.sleep(0.5)

    async def _end_as_operator(self, order: str) -> None:
        """Ask the bank, record its answer in the order service, and end the transaction accordingly."""
        paid = int(order[-4:], 16) % 2 == 0
        _, answer = await self.service.post(f"/orders/{order}/settle", {"paid": paid})
        self._progress.show_step(f"an operator ends {order}: {answer['outcome']}")
        self._recorder.operator_ends(order, answer["outcome"])
        await self.halfway.end_as_operator(order, answer["outcome"])

    async def transactions(self, state: str) -> list[dict[str, Any]]:
        """Return all of halfway's transactions in a state."""
        transactions: list[dict[str, Any]] = []
        url, headers = f"{self.halfway.url}/v1/transactions", {"Authorization": f"Bearer {self.halfway.operator_key}"}
        query = {"state": state, "limit": "1000"}
        while True:
            async with self._session.get(url, params=query, headers=headers) as response:
                response.raise_for_status()
                page = await response.json()
            transactions += page["transactions"]
            if page["next"] is None:
                return transactions
            query["cursor"] = page["next"]

    async def wait_for_departments(self) -> None:
        """Wait until each message is processed or a dead letter. After the time limit, judge the rest."""
        deadline = time.monotonic() + READ_WITHIN_S
        expected = {topic: {message.order for message in await self._read(topic)} for topic in TOPICS}
        while True:
            dead = await self._read(DEAD_LETTERS)
            finished = {
                department.topic: {*department.effects()}
                | {letter.order for letter in dead if letter.dead_letter_of == department.topic}
                for department in self.departments
            }
            for department in self.departments:
                if department.error is not None:
                    raise DemoError(f"the consumer of {department.topic} failed: {department.error}")
            if finished == expected or time.monotonic() > deadline:
                return
            await asyncio.sleep(0.2)

    async def _read(self, topic: str) -> list[TopicMessage]:
        return await asyncio.to_thread(read, self._bootstrap_servers, topic)

    async def evidence(self) -> Evidence:
        """Collect the evidence from the database, the topics and halfway."""
        states = ("prepared", "parked", "committed", "rolled_back")
        transactions = [transaction for state in states for transaction in await self.transactions(state)]
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
            seen={topic: [message.order for message in await self._read(topic)] for topic in TOPICS},
            effects={department.topic: department.effects() for department in self.departments},
            dead=dead,
            flawed={topic: {order.id for order in self._orders if order.flaw == topic} for topic in TOPICS},
            transactions=transactions,
        )


async def run(orders: Sequence[Planned], seed: int, console: Console) -> dict[str, Any]:
    """Run the story and return its summary. If there are problems, the directory with the logs is not deleted."""
    started = time.monotonic()
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
            evidence = await demo.run()
            progress.show_step("the checker reads the topics")
            bootstrap = demo.halfway.bootstrap_servers
            found_by_checker = await asyncio.to_thread(recorder.judge, bootstrap, evidence.orders, evidence.fenced)
            progress.show_step("everything is being stopped")
    except asyncio.CancelledError:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    seconds = round(time.monotonic() - started, 1)
    problems = judge(evidence) + found_by_checker
    happened, kills = demo.network.happened, demo.service.kills
    tables(console, evidence, problems, happened, kills)
    console.print(f"{seconds} s" + (f"; the logs are in {directory}" if problems else ""), highlight=False)
    if not problems:
        shutil.rmtree(directory, ignore_errors=True)
    return {**summary(evidence, problems, happened, kills), "seed": seed, "seconds": seconds}


async def _run_until_signal(orders: Sequence[Planned], seed: int, console: Console) -> dict[str, Any]:
    """Same as `run`, but the first signal stops everything in order, and further signals are ignored."""
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
    parser.add_argument("--orders", type=int, default=300, help="the number of orders (default 300)")
    parser.add_argument("--seed", type=int, default=None, help="the same seed plans the same orders and faults")
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON, the rest to stderr")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    console = Console(stderr=arguments.json)
    try:
        result = asyncio.run(_run_until_signal(plan(arguments.orders, seed), seed, console))
    except asyncio.CancelledError:
        console.print("stopped")
        return 130
    except DemoError as error:
        console.print(f"the demo failed: {error}", style="red", markup=False, highlight=False)
        return 1
    if arguments.json:
        print(json.dumps(result))
    return 0 if result["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
