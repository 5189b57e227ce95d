"""Connections for SQLite: the sqlite3 module has no context manager that opens, commits and closes a connection."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from os import PathLike

_BUSY_S = 30.0


def sqlite_transactions(
    path: str | PathLike[str], *, busy_s: float = _BUSY_S
) -> Callable[[], AbstractContextManager[sqlite3.Connection]]:
    """Return a connection factory for a file. Each connection is one transaction, which its context commits or undoes.

    A statement waits up to `busy_s` seconds for another connection that writes.
    """

    @contextmanager
    def begin() -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(path, timeout=busy_s)) as connection, connection:
            yield connection

    return begin
