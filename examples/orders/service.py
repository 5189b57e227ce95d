"""The order service: its own process, its own SQLite database, and halfway through its Python client.

An order is one halfway transaction: four messages are prepared, the order goes into the database, and the transaction
is ended. If the end is lost, halfway asks `/check`, which answers from the database.
"""

import argparse
import asyncio
import json
import os
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web

from halfway.client import AiohttpChecks, Check, Halfway, HalfwayError, Message, Outcome
from halfway.client.barrier import Barrier, LateTransactionError

Order = dict[str, Any]

TOPICS = ("coupon", "shipping", "points", "cart")
SETTLES_AFTER_S = 1.5
"""How long a bank transfer takes here."""
LATE_S = 4.0
"""How long the slowest card payment takes: longer than halfway waits before it asks."""

# One set of four messages per order; the groups differ in what halfway does when nobody knows the outcome for long.
POLICIES: dict[str, dict[str, object]] = {
    "orders": {"max_checks": 4, "on_exhausted": "park"},
    "preorders": {"max_checks": 2, "on_exhausted": "rollback"},
}
TIMES = {"first_check_after_s": 2, "check_interval_s": 1, "max_interval_s": 2}
PAID_BY: dict[str, str] = {"card": "paid", "card-late": "paid", "card-declined": "failed"}
VERDICTS: dict[str, Outcome] = {"paid": "commit", "failed": "rollback", "awaiting": "unknown", "fenced": "rollback"}
"""What a state of an order means for its messages."""


class Orders:
    """The service's orders, and the barrier: an order whose row says rollback can never be placed."""

    def __init__(self, path: Path) -> None:
        """Open the database, made on first use; what it holds is what a killed service knows when it comes back."""
        self._path = path
        self._turn = threading.Lock()
        self.barrier = Barrier("sqlite", self.begin)
        with self.begin() as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, customer TEXT NOT NULL, payment TEXT NOT NULL,"
                " state TEXT NOT NULL CHECK (state IN ('paid', 'failed', 'awaiting')), placed_at REAL NOT NULL)"
            )
        self.barrier.create()

    @contextmanager
    def begin(self) -> Iterator[sqlite3.Connection]:
        with self._turn, closing(sqlite3.connect(self._path, timeout=10)) as connection, connection:
            yield connection

    def place(self, order: Order) -> str:
        """Do the local transaction: return the state that the order's payment leads to; raises LateTransactionError."""
        state = PAID_BY.get(order["payment"], "awaiting")
        with self.begin() as connection:
            self.barrier.insert(connection, order["id"])
            row = order["id"], order["customer"], order["payment"], state, time.time()
            connection.execute("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", row)
        return state

    def decide(self, check: Check) -> Outcome:
        """Answer a check: the barrier says whether the order was placed, its state what became of the payment."""
        outcome = self.barrier.decide(check)
        return VERDICTS[self.state(check.id)] if outcome == "commit" else outcome

    def settle(self, order_id: str, state: str) -> Outcome:
        """Note what the bank says of an order that awaits its payment, and return what that means."""
        with self.begin() as connection:
            connection.execute("UPDATE orders SET state = ? WHERE id = ? AND state = 'awaiting'", (state, order_id))
        now = datetime.now(UTC).isoformat()
        return self.decide(Check(id=order_id, group="", prepared_at=now, attempt=1, messages=()))

    def settle_due(self, before: float) -> None:
        """Let the bank transfers that are old enough arrive or bounce; an invoice nobody pays stays open."""
        with self.begin() as connection:
            for payment, state in (("transfer", "paid"), ("transfer-bounces", "failed")):
                connection.execute(
                    "UPDATE orders SET state = ? WHERE state = 'awaiting' AND payment = ? AND placed_at < ?",
                    (state, payment, before),
                )

    def state(self, order_id: str) -> str:
        with self.begin() as connection:
            (state,) = connection.execute("SELECT state FROM orders WHERE id = ?", (order_id,)).fetchone()
        return str(state)


class OrderService:
    """The HTTP side: `POST /orders`, `POST /orders/{id}/settle` and `POST /check`."""

    def __init__(self, database: Path, halfway_url: str, check_url: str) -> None:
        """Keep the settings; `running` opens the clients."""
        self._orders = Orders(database)
        self._check_url = check_url
        self._clients = {group: Halfway(halfway_url, group, prepare_timeout_s=3, end_timeout_s=2) for group in POLICIES}

    def app(self) -> web.Application:
        app = web.Application()
        app.cleanup_ctx.append(self.running)
        app.router.add_post("/orders", self.place)
        app.router.add_post("/orders/{id}/settle", self.settle)
        app.router.add_post("/check", AiohttpChecks(self._orders.decide).__call__)
        return app

    async def running(self, app: web.Application) -> AsyncIterator[None]:
        """Register with halfway before the first request; again at every start, which changes nothing."""
        del app
        async with AsyncExitStack() as stack:
            for group, policy in POLICIES.items():
                client = await stack.enter_async_context(self._clients[group])
                await client.register(topics=TOPICS, check_urls=[self._check_url], policy=TIMES | policy)
            bank = asyncio.create_task(self._bank())
            yield
            bank.cancel()

    async def place(self, request: web.Request) -> web.Response:
        """Take an order: prepare, local transaction, end. The transaction's id is the order's own."""
        order: Order = await request.json()
        try:
            # The customer need not wait for the end: if it is lost, halfway asks.
            async with self._clients[order["group"]].transaction(
                _messages(order), id=order["id"], confirm=False
            ) as transaction:
                if order["payment"] == "card-late":
                    await asyncio.sleep(LATE_S)
                state = await asyncio.to_thread(self._orders.place, order)
                if VERDICTS[state] == "rollback":
                    await transaction.rollback(order["payment"])
                elif VERDICTS[state] == "unknown":
                    await transaction.unknown(order["payment"])
        except LateTransactionError:
            state = "fenced"
        except HalfwayError:
            return web.json_response({"error": "not now, please order again"}, status=503)
        return web.json_response({"id": order["id"], "state": state}, status=201)

    async def settle(self, request: web.Request) -> web.Response:
        """Take what a person found out at the bank."""
        order_id, body = request.match_info["id"], await request.json()
        outcome = await asyncio.to_thread(self._orders.settle, order_id, "paid" if body["paid"] else "failed")
        return web.json_response({"id": order_id, "outcome": outcome})

    async def _bank(self) -> None:
        while True:
            await asyncio.to_thread(self._orders.settle_due, time.time() - SETTLES_AFTER_S)
            await asyncio.sleep(0.2)


def _messages(order: Order) -> list[Message]:
    details: dict[str, object] = order["details"]
    return [
        Message(topic=topic, key=order["id"], value=json.dumps({"order": order["id"], topic: details.get(topic)}))
        for topic in TOPICS
    ]


def _end_with_stdin() -> None:
    """Stop this process when the one that holds the other end of its standard input is gone, however it ended."""
    # Not through `sys.stdin`: its lock, held here, would keep the interpreter from ending.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--check-url", help="where halfway reaches /check, if not at the address above")
    parser.add_argument("--database", type=Path, default=Path("orders.sqlite"))
    parser.add_argument("--halfway", default="http://127.0.0.1:8080")
    parser.add_argument("--with-parent", action="store_true")
    return parser


def main() -> None:
    """Run the service until SIGTERM, or with `--with-parent` until its standard input is closed."""
    given = command_line().parse_args()
    if given.with_parent:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    check_url = given.check_url or f"http://{given.host}:{given.port}/check"
    service = OrderService(given.database, given.halfway, check_url)
    web.run_app(service.app(), host=given.host, port=given.port, access_log=None, print=None)


if __name__ == "__main__":
    main()
