"""The outcomes in the producers' own database: written once, by the first writer."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from checker.history import Outcome


class Decisions:
    """A table with one row for each decided transaction, as a producer service keeps it.

    A check about a transaction that has no row writes `rollback` into it: a local transaction that comes later finds
    the row and fails.
    """

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = OFF")  # there are no power failures here
        self._database.execute("CREATE TABLE decided (id TEXT PRIMARY KEY, outcome TEXT NOT NULL)")

    def decide(self, transaction_id: str, outcome: Outcome) -> Outcome:
        """Write the outcome unless there is one, and return the stored one."""
        self._database.execute("INSERT OR IGNORE INTO decided VALUES (?, ?)", (transaction_id, outcome))
        stands = self.find(transaction_id)
        assert stands is not None
        return stands

    def find(self, transaction_id: str) -> Outcome | None:
        row = self._database.execute("SELECT outcome FROM decided WHERE id = ?", (transaction_id,)).fetchone()
        return None if row is None else ("commit" if row[0] == "commit" else "rollback")

    def close(self) -> None:
        self._database.close()
