"""An order service in Python: the same contract as the services beside it, with the client of halfway and Psycopg."""

import json
import os
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psycopg

from halfway.client import Message, SyncHalfway, answer_check_sync, transaction_id
from halfway.client.barrier import Barrier
from halfway.client.errors import AlreadyEndedError, HalfwayError

GROUP, TOPIC = os.environ.get("GROUP", "shop"), os.environ.get("TOPIC", "orders")
KEY = os.environ.get("HALFWAY_KEY") or None
PORT = os.environ.get("PORT", "9000")
STATUS = {"commit": 200, "committed": 200, "rollback": 409, "rolled_back": 409}
"""Of what is known. Anything else, such as a parked transaction, is 503: it may be in the database or not."""


def begin() -> Any:
    return psycopg.connect(os.environ.get("DATABASE_URL", "postgresql://localhost/shop"), connect_timeout=2)


barrier = Barrier("postgresql", begin)
halfway = SyncHalfway(os.environ.get("HALFWAY_URL", "http://127.0.0.1:8080"), GROUP, barrier=barrier, key=KEY)
verifier = None


def place_order(body: bytes, _headers: Mapping[str, str]) -> tuple[int, bytes]:
    order = json.loads(body)
    at = order.get("at", time.time_ns() // 1_000_000)
    wanted = transaction_id(f"shop/order/{order['id']}", at)
    message = Message(topic=TOPIC, key=order["id"], value={"order": order["id"], "total": order["total"]})
    is_prepared = False
    try:
        with halfway.transaction([message], id=wanted):
            is_prepared = True
            with begin() as connection:
                barrier.insert(connection, wanted)
                connection.execute("INSERT INTO orders (id, total) VALUES (%s, %s)", (order["id"], order["total"]))
    except AlreadyEndedError as error:
        return STATUS.get(error.state, 503), answer(id=wanted, state=error.state)
    except (HalfwayError, psycopg.Error) as error:
        if not is_prepared:  # refused, or stored all the same, and then a check rolls it back
            return 503, answer(id=wanted, error=str(error))
        outcome = barrier.settle(wanted)  # also if only the answer of the commit was lost
        return STATUS.get(outcome, 503), answer(id=wanted, outcome=outcome, error=str(error))
    return 201, answer(id=wanted, outcome="commit")


def answer_check(body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
    return answer_check_sync(body, barrier.decide, headers=headers, verifier=verifier)


def answer(**fields: object) -> bytes:
    return json.dumps(fields).encode()


class Handler(BaseHTTPRequestHandler):
    """Answers POST /orders and POST /check."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        handle = {"/orders": place_order, "/check": answer_check}[self.path]
        status, content = handle(body, dict(self.headers.items()))
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    barrier.create()  # a service with migrations has barrier.migration() there instead
    with begin() as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS orders (id text PRIMARY KEY, total float8 NOT NULL)")
    barrier.clean(100)
    halfway.start(topics=[TOPIC], check_urls=[os.environ.get("CHECK_URL", f"http://127.0.0.1:{PORT}/check")])
    verifier = halfway.check_verifier() if KEY else None
    ThreadingHTTPServer(("127.0.0.1", int(PORT)), Handler).serve_forever()
