"""The barrier in a database of a Django project."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections

from halfway.client.barrier import RETENTION_S, TABLE, Barrier


def django_barrier(using: str = DEFAULT_DB_ALIAS, *, table: str = TABLE, retention_s: float = RETENTION_S) -> Barrier:
    """Return the barrier in the database `using` of DATABASES. The other parameters are those of `Barrier`.

    Checks and deletions use their own short-lived connections, outside of a pool in OPTIONS. They therefore work in a
    view with ATOMIC_REQUESTS, in any thread, and when the pool is exhausted.
    """

    @contextmanager
    def connect() -> Iterator[Any]:
        connection = connections.create_connection(using)
        options = {name: value for name, value in connection.settings_dict["OPTIONS"].items() if name != "pool"}
        connection.settings_dict = {**connection.settings_dict, "OPTIONS": options}
        try:
            connection.set_autocommit(False)
            yield connection
            connection.commit()
        finally:
            connection.close()

    return Barrier(connections[using].vendor, connect, table=table, retention_s=retention_s)
