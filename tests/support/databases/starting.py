"""Processes of a service that start together: each makes sure of its tables, then writes in one transaction of each.

`python -m tests.support.databases.starting DIALECT SERVER PROCESSES TABLES STARTS` does this STARTS times for each of
TABLES tables and prints the errors of all as a JSON list. The processes are forked, so that only one imports.
"""

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier as Gate
from typing import Any
from uuid import uuid4

from halfway.client.barrier import Barrier, sqlite_transactions
from halfway.client.consumer import Inbox
from tests.support.databases.servers import USER
from tests.support.waiting import GENEROUS_S


def connect_to(dialect: str, server: str) -> Callable[[], Any]:
    """Return what opens a connection: `server` is PostgreSQL's folder, MariaDB's socket, or SQLite's file."""
    if dialect == "sqlite":
        return sqlite_transactions(server)
    if dialect == "postgresql":
        import psycopg

        return lambda: psycopg.connect(host=server, user=USER, dbname="postgres")
    import pymysql

    @contextmanager
    def transaction() -> Iterator[Any]:
        with pymysql.connect(unix_socket=server, user=USER, database="test", ssl_disabled=True) as connection:
            yield connection
            connection.commit()

    return transaction


def start(gate: Gate, told: Connection, dialect: str, server: str, tables: int, starts: int) -> None:
    """Be one of the processes: pass the gate together with the others, and tell the errors."""
    connect = connect_to(dialect, server)
    errors = []
    gate.wait(GENEROUS_S)
    for number in range(tables * starts):
        barrier = Barrier(dialect, connect, table=f"starts_{number % tables}")
        inbox = Inbox(dialect, connect, table=f"starts_inbox_{number % tables}")
        try:
            barrier.create()
            inbox.create()
            with connect() as connection:
                barrier.insert(connection, uuid4().hex)
            with connect() as connection:
                inbox.insert(connection, "points", uuid4().hex)
        except Exception as error:  # noqa: BLE001 - of any driver
            errors.append(f"{type(error).__name__}: {error}")
    told.send(errors)


def main(dialect: str, server: str, processes: int, tables: int, starts: int) -> None:
    fork = multiprocessing.get_context("fork")
    gate = fork.Barrier(processes)
    connect_to(dialect, server)  # it imports the driver
    hearing = []
    for _ in range(processes):
        hear, tell = fork.Pipe(duplex=False)
        fork.Process(target=start, args=(gate, tell, dialect, server, tables, starts)).start()
        tell.close()
        hearing.append(hear)
    sys.stdout.write(json.dumps([error for each in hearing for error in each.recv()]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
