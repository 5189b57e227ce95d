"""The order service: a process with its own SQLite database, which uses halfway's Python client.

An order is one transaction: the service prepares four messages, inserts the order into the database, and ends the
transaction.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from examples.orders.payments import charge, settle_transfers
from halfway.client import Check, Halfway, HalfwayError, Message, Outcome, join_aiohttp
from halfway.client.barrier import Barrier, LateTransactionError, sqlite_transactions

TOPICS = ("coupon", "shipping", "points", "cart")
TIMES = {"first_check_after_s": 2, "check_interval_s": 1, "max_interval_s": 2}
POLICIES: dict[str, dict[str, object]] = {
    "orders": {"max_checks": 4, "on_exhausted": "park"},
    "preorders": {"max_checks": 2, "on_exhausted": "rollback"},
}
VERDICTS: dict[str, Outcome] = {"paid": "commit", "failed": "rollback", "awaiting": "unknown", "fenced": "rollback"}


class OrderService:
    """Serves `POST /orders`, `POST /orders/{id}/settle`, and the checks that halfway sends if an end is lost."""

    def __init__(self, database: Path, halfway_url: str, check_url: str, keys: Mapping[str, str] | None = None) -> None:
        self._begin = sqlite_transactions(database)
        self._barrier = Barrier("sqlite", self._begin)
        self._barrier.create()
        with self._begin() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, payment, state, placed_at)")
        self.app = web.Application()
        self.app.router.add_post("/orders", self.place)
        self.app.router.add_post("/orders/{id}/settle", self.settle)
        self._clients = {
            group: Halfway(halfway_url, group, key=(keys or {}).get(group), prepare_timeout_s=3, end_timeout_s=2)
            for group in POLICIES
        }
        for group, client in self._clients.items():
            policy = TIMES | POLICIES[group]
            join_aiohttp(self.app, client, topics=TOPICS, check_url=check_url, policy=policy, decide=self.decide)

    async def place(self, request: web.Request) -> web.Response:
        order = await request.json()
        values = {topic: json.dumps({"order": order["id"], topic: order["details"].get(topic)}) for topic in TOPICS}
        messages = [Message(topic=topic, key=order["id"], value=value) for topic, value in values.items()]
        try:
            client = self._clients[order["group"]]
            async with client.transaction(messages, id=order["id"], confirm=False) as transaction:
                state = await charge(order["payment"])
                await asyncio.to_thread(self.insert, order, state)
                await transaction.end(VERDICTS[state], order["payment"])
        except LateTransactionError:
            state = "fenced"
        except HalfwayError:
            return web.json_response({"error": "please order again later"}, status=503)
        return web.json_response({"id": order["id"], "state": state}, status=201)

    def insert(self, order: dict[str, Any], state: str) -> None:
        """Run the local transaction; raises LateTransactionError if a check came first."""
        with self._begin() as connection:
            self._barrier.insert(connection, order["id"])
            row = order["id"], order["payment"], state, time.time()
            connection.execute("INSERT INTO orders VALUES (?, ?, ?, ?)", row)

    def decide(self, check: Check) -> Outcome:
        """Answer a check: the barrier knows whether the order was placed, and its state is that of the payment."""
        outcome = self._barrier.decide(check)
        return self.verdict(check.id) if outcome == "commit" else outcome

    def verdict(self, order: str) -> Outcome:
        with self._begin() as connection:
            settle_transfers(connection)
            (state,) = connection.execute("SELECT state FROM orders WHERE id = ?", (order,)).fetchone()
        return VERDICTS[state]

    def find_out(self, order: str, state: str) -> Outcome:
        """Record the decision of a person. If the order was not placed yet, it can no longer be placed."""
        if self._barrier.settle(order) != "commit":
            return "rollback"
        with self._begin() as connection:
            connection.execute("UPDATE orders SET state = ? WHERE id = ? AND state = 'awaiting'", (state, order))
        return self.verdict(order)

    async def settle(self, request: web.Request) -> web.Response:
        order, paid = request.match_info["id"], (await request.json())["paid"]
        outcome = await asyncio.to_thread(self.find_out, order, "paid" if paid else "failed")
        return web.json_response({"id": order, "outcome": outcome})
