"""Transactions for SQLite: its module has no transaction that ends with a `with` block."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from os import PathLike

_BUSY_S = 30.0


def sqlite_transactions(
    path: str | PathLike[str], *, busy_s: float = _BUSY_S
) -> Callable[[], AbstractContextManager[sqlite3.Connection]]:
    """Return what connects to a file for one transaction: it commits when its block is left, or rolls back.

    A statement waits up to `busy_s` for another connection that writes.
    """

    @contextmanager
    def begin() -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(path, timeout=busy_s)) as connection, connection:
            yield connection

    return begin
