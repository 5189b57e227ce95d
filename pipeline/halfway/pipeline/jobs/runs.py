"""The Delta tables of an audit. What a run writes is one transaction for whoever reads them: its state ends it."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from halfway.pipeline.engines.engine import Once
from halfway.pipeline.errors import SourceError
from halfway.pipeline.tables import delta

if TYPE_CHECKING:
    from collections.abc import Iterator

    from halfway.pipeline.engines.engine import Engine, Frame, Merge
    from halfway.pipeline.tables.folders import Files

VERDICTS: Final = "verdicts"
ANOMALIES: Final = "anomalies"
QUARANTINE: Final = "quarantine"
DIFFERENCES: Final = "differences"
EVENTS: Final = "events"
CARRIED: Final = "carried"
TABLES: Final = (VERDICTS, ANOMALIES, QUARANTINE, DIFFERENCES, EVENTS, CARRIED)
STATE: Final = "state"
"""A table of one row: the last run, the version of every other table, and what the next run needs to know."""
_COLUMNS: Final = "run bigint, at bigint, attempt string, versions string, content string"
_APPLICATION: Final = "halfway-audit"
_TIDIED_AFTER: Final = 100
"""Runs: at one every ten minutes, most of a day."""


class Tables:
    """The tables in a folder as the last run that ended has left them, and what the present run writes into them.

    1. `begin` brings every table back to the version that the state names. A run that was killed has left more.
    2. `write`, `merge` and `delete` each make one commit. It must be the one after the version that the run knows.
    3. `end` writes the state with the versions of all tables. Delta accepts a number of a run once.

    So a run that was killed anywhere is repeated as a whole. Of two runs over one folder, the one whose commit comes
    second fails, and what the other one has written stays.
    """

    def __init__(self, engine: Engine, folder: Files) -> None:
        """Read the state of a folder.

        Raises:
            SourceError: its tables have lost their state, or are of an earlier release.

        """
        self.engine, self._folder = engine, folder
        self.run = -1
        """The number of the last run that ended, -1 if there is none."""
        self.content: dict[str, Any] = {}
        """What it has left in the state."""
        self._versions: dict[str, int] = {}
        self._heads: dict[str, int] = {}
        self._begun = self._version(STATE) >= 0
        if self._begun:
            for row in engine.rows(engine.load(folder.path(STATE))):
                self.run = int(row["run"])
                self._versions, self.content = json.loads(row["versions"]), json.loads(row["content"])
        elif folder.names(VERDICTS):
            raise SourceError(
                f"{folder.path()!r} holds verdicts without their {STATE!r}, or those of an earlier release: restore "
                f"the table {STATE!r} from a backup, or give another folder"
            )

    def has(self, name: str) -> bool:
        """Return whether the last run, or this one, has left a table."""
        return name in self._versions

    def read(self, name: str) -> Frame:
        """Return a table as the last run, or this one, has left it."""
        return self.engine.load(self._folder.path(name), self._versions[name])

    def begin(self, *, anew: bool = False) -> int:
        """Begin a run, and return its number. A run that begins `anew` replaces all rows of earlier ones.

        Raises:
            SourceError: a table is older than the state says.

        """
        if not self._begun:
            with _conflicts(self._folder):
                self.engine.save(self.engine.table([], _COLUMNS), self._folder.path(STATE))
        if anew:
            self._versions = {}
        for name, version in self._versions.items():
            head = self._version(name)
            if head < version:
                raise SourceError(
                    f"{self._folder.path(name)} has version {head}, and the state names {version}: restore it from the "
                    "same backup as the other tables, or give another folder"
                )
            if head > version:
                with _conflicts(self._folder):
                    self.engine.restore(self._folder.path(name), version)
        self._heads = {name: self._version(name) for name in TABLES}
        return self.run + 1

    def write(self, name: str, rows: Frame, *, replace: bool = False) -> Frame:
        """Append rows to a table, or replace all, and return the whole table."""
        new = name not in self._versions
        self._commit(name, lambda path: self.engine.save(rows, path, replace=replace or new))
        return self.read(name)

    def merge(self, name: str, changes: Frame, rule: Merge) -> None:
        """Apply changes, of which there is at least one, to a table."""
        self._commit(name, lambda path: self.engine.merge(changes, path, rule))

    def tidy(self, outdated: dict[str, str]) -> None:
        """Now and then, delete outdated rows (by table, a condition), and combine small files."""
        if self.run < 0 or (self.run + 1) % _TIDIED_AFTER:
            return
        for name in self._versions:
            condition = outdated.get(name, "false")
            # Each of its steps can make a commit or two.
            self._commit(name, lambda path, condition=condition: self.engine.tidy(path, condition), least=0, most=5)
        self.engine.tidy(self._folder.path(STATE))

    def end(self, content: dict[str, Any], *, at: int) -> None:
        """End the run: its tables count from now on.

        Raises:
            SourceError: another run has ended in the meantime.

        """
        run, attempt, path = self.run + 1, uuid4().hex, self._folder.path(STATE)
        row = (run, at, attempt, json.dumps(self._versions), json.dumps(content))
        with _conflicts(self._folder):
            self.engine.save(self.engine.table([row], _COLUMNS), path, replace=True, once=Once(_APPLICATION, run))
        [there] = self.engine.rows(self.engine.load(path))
        if there["attempt"] != attempt:
            raise _conflict(self._folder)
        self.run, self.content = run, content

    def _commit(self, name: str, change: Any, *, least: int = 1, most: int = 1) -> None:
        """Change a table by a number of commits."""
        before = self._heads[name]
        with _conflicts(self._folder):
            change(self._folder.path(name))
        head = self._version(name)
        if not least <= head - before <= most:
            raise _conflict(self._folder)
        self._heads[name] = self._versions[name] = head

    def _version(self, name: str) -> int:
        """Return the number of the last commit of a table, -1 if it does not exist."""
        return next(iter(delta.versions(self._folder, name)), -1)


def _conflict(folder: Files) -> SourceError:
    return SourceError(f"another audit has written into {folder.path()!r} at the same time: run one at a time")


@contextmanager
def _conflicts(folder: Files) -> Iterator[None]:
    """Report a commit that Delta refuses because of another one."""
    try:
        yield
    except Exception as error:
        # Each of the two libraries has classes of its own for it, and Spark wraps them.
        if "oncurrent" in str(error) or type(error).__name__ == "CommitFailedError":
            raise _conflict(folder) from error
        raise
