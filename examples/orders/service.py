"""The order service: its own process, its own SQLite database, and halfway only over HTTP.

An order is one halfway transaction: four messages are prepared, the order goes into the database, and the transaction
is ended. Where the end is lost, halfway asks `/check`, which answers from the database.
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
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

Order = dict[str, Any]
T = TypeVar("T")

TOPICS = ("coupon", "shipping", "points", "cart")
SETTLES_AFTER_S = 1.5
"""How long a bank transfer takes here."""
LATE_S = 4.0
"""How long the slowest card payment takes: longer than halfway waits before it asks."""
REGISTER_TRIES = 100

# One set of four messages per order; the groups differ in what halfway does when nobody knows the outcome for long.
POLICIES: dict[str, dict[str, object]] = {
    "orders": {"max_checks": 4, "on_exhausted": "park"},
    "preorders": {"max_checks": 2, "on_exhausted": "rollback"},
}
TIMES = {"first_check_after_s": 2, "check_interval_s": 1, "max_interval_s": 2}

SCHEMA = """
CREATE TABLE IF NOT EXISTS orders (
    id TEXT PRIMARY KEY,
    customer TEXT NOT NULL,
    payment TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('paid', 'failed', 'awaiting')),
    placed_at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS barrier (
    transaction_id TEXT PRIMARY KEY,
    inserted_by TEXT NOT NULL CHECK (inserted_by IN ('order', 'check'))
);
"""


class FencedError(Exception):
    """halfway asked about this order before it was in the database, and was told that it never will be."""


class Database:
    """The service's orders. Each method is one database transaction."""

    def __init__(self, path: Path) -> None:
        """Open the database, made on first use; what it holds is what a killed service knows when it comes back."""
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=10)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.executescript(SCHEMA)

    def place(self, order: Order) -> str:
        """Do the local transaction: insert the order with the state that its payment leads to, and return that.

        Raises:
            FencedError: a check was answered `rollback` for this order before; nothing is inserted.

        """
        state = {"card": "paid", "card-late": "paid", "card-declined": "failed"}.get(order["payment"], "awaiting")
        try:
            with self._transaction():
                self._connection.execute("INSERT INTO barrier VALUES (?, 'order')", (order["id"],))
                self._connection.execute(
                    "INSERT INTO orders VALUES (?, ?, ?, ?, ?)",
                    (order["id"], order["customer"], order["payment"], state, time.time()),
                )
        except sqlite3.IntegrityError:
            raise FencedError(order["id"]) from None
        return state

    def verdict(self, transaction_id: str) -> str:
        """Say what became of an order; one that is not there is fenced off for good before `rollback` is said.

        An order that is absent now could still be inserted a moment later by a slow request, after halfway has been
        told `rollback`. So the check takes the order's place in `barrier`: whichever comes first wins, and the other
        one's insert fails. (The table is known from DTM's sub-transaction barrier.)
        """
        with self._transaction():
            self._connection.execute("INSERT OR IGNORE INTO barrier VALUES (?, 'check')", (transaction_id,))
            row = self._connection.execute("SELECT state FROM orders WHERE id = ?", (transaction_id,)).fetchone()
        return VERDICTS[row[0] if row else "fenced"]

    def settle(self, order_id: str, *, paid: bool) -> str:
        """Note what the bank says of an order that awaits its payment, and return the state that stands."""
        state = "paid" if paid else "failed"
        with self._transaction():
            self._connection.execute("INSERT OR IGNORE INTO barrier VALUES (?, 'check')", (order_id,))
            self._connection.execute(
                "UPDATE orders SET state = ? WHERE id = ? AND state = 'awaiting'", (state, order_id)
            )
            row = self._connection.execute("SELECT state FROM orders WHERE id = ?", (order_id,)).fetchone()
        return str(row[0]) if row else "fenced"

    def settle_due(self, before: float) -> None:
        """Let the bank transfers that are old enough arrive or bounce; an invoice nobody pays stays open."""
        for payment, state in (("transfer", "paid"), ("transfer-bounces", "failed")):
            self._connection.execute(
                "UPDATE orders SET state = ? WHERE state = 'awaiting' AND payment = ? AND placed_at < ?",
                (state, payment, before),
            )

    def close(self) -> None:
        self._connection.close()

    def _transaction(self) -> sqlite3.Connection:
        self._connection.execute("BEGIN IMMEDIATE")
        return self._connection


VERDICTS = {"paid": "commit", "failed": "rollback", "awaiting": "unknown", "fenced": "rollback"}
"""What a state of an order means for its messages."""


class Halfway:
    """The four calls of halfway that a producer needs."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        """Keep where halfway is."""
        self._session = session
        self._url = f"{url}/v1"

    async def register(self, check_url: str) -> None:
        """Say where halfway can ask, and how often; again at every start, which changes nothing."""
        for group, policy in POLICIES.items():
            body = {"check": {"urls": [check_url]}, "topics": list(TOPICS), "policy": TIMES | policy}
            for _ in range(REGISTER_TRIES):
                if await self._call("PUT", f"/groups/{group}", body) in {200, 201}:
                    break
                await asyncio.sleep(0.2)
            else:
                raise RuntimeError(f"halfway does not take the group {group}: is it running?")

    async def prepare(self, order: Order) -> bool:
        """Store the four messages out of sight; False means that nothing may be done for this order.

        The transaction's id is the order's own, so that an answer that was lost can be asked for again: the same
        prepare twice is one transaction.
        """
        details: dict[str, object] = order["details"]
        messages = [
            {"topic": topic, "key": order["id"], "value": json.dumps({"order": order["id"], topic: details.get(topic)})}
            for topic in TOPICS
        ]
        body = {"group": order["group"], "id": order["id"], "messages": messages}
        for _ in range(2):
            if await self._call("POST", "/transactions", body) in {200, 201}:
                return True
        return False

    async def end(self, transaction_id: str, outcome: str, remark: str) -> None:
        """Tell the outcome, once: where that fails, halfway asks `/check`."""
        await self._call("POST", f"/transactions/{transaction_id}/end", {"outcome": outcome, "remark": remark})

    async def _call(self, method: str, path: str, body: object) -> int | None:
        """Return the status, None for no answer."""
        try:
            async with self._session.request(method, self._url + path, json=body) as response:
                return response.status
        except (aiohttp.ClientError, TimeoutError):
            return None


class OrderService:
    """The HTTP side: `POST /orders`, `POST /orders/{id}/settle` and `POST /check`."""

    def __init__(self, database_path: Path, halfway_url: str, check_url: str) -> None:
        """Keep the settings; `running` opens everything."""
        self._path = database_path
        self._halfway_url = halfway_url
        self._check_url = check_url
        # SQLite waits for the disk: it has a thread of its own.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="database")

    def app(self) -> web.Application:
        app = web.Application()
        app.cleanup_ctx.append(self.running)
        app.router.add_post("/orders", self.place)
        app.router.add_post("/orders/{id}/settle", self.settle)
        app.router.add_post("/check", self.check)
        return app

    async def running(self, app: web.Application) -> AsyncIterator[None]:
        """Open the database and register with halfway before the first request; close both after the last."""
        del app
        self._database = await self._in_database(lambda: Database(self._path))
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
            self._halfway = Halfway(session, self._halfway_url)
            await self._halfway.register(self._check_url)
            bank = asyncio.create_task(self._bank())
            yield
            bank.cancel()
        await self._in_database(self._database.close)
        self._pool.shutdown()

    async def place(self, request: web.Request) -> web.Response:
        """Take an order: prepare, local transaction, end."""
        order: Order = await request.json()
        if not await self._halfway.prepare(order):
            return web.json_response({"error": "not now, please order again"}, status=503)
        if order["payment"] == "card-late":
            await asyncio.sleep(LATE_S)
        try:
            state, remark = await self._in_database(lambda: self._database.place(order)), order["payment"]
        except FencedError:
            state, remark = "fenced", "came after a check had said rollback"
        except sqlite3.Error as error:
            # Whether it is in the database is not known here: the check will find out.
            await self._halfway.end(order["id"], "unknown", f"database: {error}")
            return web.json_response({"error": "please look at your orders"}, status=500)
        await self._halfway.end(order["id"], VERDICTS[state], remark)
        return web.json_response({"id": order["id"], "state": state}, status=201)

    async def settle(self, request: web.Request) -> web.Response:
        """Take what a person found out at the bank."""
        body = await request.json()
        state = await self._in_database(lambda: self._database.settle(request.match_info["id"], paid=body["paid"]))
        return web.json_response({"id": request.match_info["id"], "state": state, "outcome": VERDICTS[state]})

    async def check(self, request: web.Request) -> web.Response:
        """Answer halfway's question what became of a transaction."""
        question = await request.json()
        outcome = await self._in_database(lambda: self._database.verdict(question["id"]))
        # Echoed, the nonce binds this answer to this question; a check that an operator makes by hand has none.
        nonce = {"nonce": question["nonce"]} if "nonce" in question else {}
        return web.json_response({"outcome": outcome, **nonce})

    async def _bank(self) -> None:
        while True:
            await self._in_database(lambda: self._database.settle_due(time.time() - SETTLES_AFTER_S))
            await asyncio.sleep(0.2)

    async def _in_database(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


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
