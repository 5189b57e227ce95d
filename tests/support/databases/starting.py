"""One process of a service that starts: it makes sure of its tables, then writes in one local transaction of each.

`python -m tests.support.databases.starting DIALECT SERVER TABLES STARTS` does this STARTS times for each of TABLES
tables and prints the errors as a JSON list. A line on standard input releases it, so that all processes start together.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from halfway.client.barrier import Barrier, sqlite_transactions
from halfway.client.consumer import Inbox
from tests.support.databases.servers import USER


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


def main(dialect: str, server: str, tables: int, starts: int) -> None:
    connect = connect_to(dialect, server)
    errors = []
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
    sys.stdout.write(json.dumps(errors))


if __name__ == "__main__":
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
