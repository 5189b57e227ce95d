"""The barrier in a database of a Django project."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections

from halfway.client.barrier import Barrier


def django_barrier(using: str = DEFAULT_DB_ALIAS, **settings: Any) -> Barrier:
    """Return the barrier in the database that DATABASES calls `using`, with other settings of `Barrier`.

    Checks and the cleaning have short-lived connections of their own, so they work in a view with ATOMIC_REQUESTS and
    in any thread.
    """

    @contextmanager
    def connect() -> Iterator[Any]:
        connection = connections.create_connection(using)
        try:
            connection.set_autocommit(False)
            yield connection
            connection.commit()
        finally:
            connection.close()

    return Barrier(connections[using].vendor, connect, **settings)
