"""Folders, and the Delta tables of an audit in them: what a run writes is one transaction for its readers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final
from uuid import uuid4

from pyspark.sql import SparkSession

from halfway.pipeline.engines.dialect import Frame, Merge, Once
from halfway.pipeline.engines.engine import Engine
from halfway.pipeline.errors import PipelineError


def is_local(path: str) -> bool:
    scheme, sign, _ = path.partition("://")
    return not sign or scheme == "file"


class LocalFolder:
    """A folder of this machine, without a JVM."""

    def __init__(self, path: str) -> None:
        """Take a folder, as a path or a URI with `file:`. Nothing is created before something is written."""
        self.uri = str(Path(path.removeprefix("file://").removeprefix("file:")))

    def path(self, *parts: str) -> str:
        return str(Path(self.uri, *parts))

    def names(self, *parts: str) -> list[str]:
        """Return the names of what is in a folder; none if it does not exist."""
        folder = Path(self.uri, *parts)
        return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []

    def write(self, text: str, *parts: str) -> None:
        there = Path(self.uri, *parts)
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text(text, encoding="utf-8")

    def read(self, *parts: str) -> str:
        """Return the text of a small file; PipelineError if it does not exist."""
        there = Path(self.uri, *parts)
        if not there.is_file():
            raise PipelineError(f"there is no {there}")
        return there.read_text(encoding="utf-8")


class Folder:
    """A folder by path or URI, through Hadoop's file systems, as for Spark itself."""

    def __init__(self, spark: SparkSession, uri: str) -> None:
        context = spark.sparkContext
        # No types: py4j creates its classes while it runs.
        jvm: Any = context._jvm  # noqa: SLF001 - the documented way into Spark's JVM from Python
        self._jvm = jvm
        # For each part of a name py4j asks the JVM, which searches all its jars.
        self._make_path = jvm.org.apache.hadoop.fs.Path
        self._configuration: Any = context._jsc.hadoopConfiguration()  # noqa: SLF001
        self.uri = uri.rstrip("/")
        path, system = self._at()
        if not path.isAbsolute():
            # In SQL Delta takes the name of a relative path for that of a table in a catalog.
            self.uri = str(system.makeQualified(path).toString())

    def path(self, *parts: str) -> str:
        return "/".join((self.uri, *parts))

    def names(self, *parts: str) -> list[str]:
        path, system = self._at(*parts)
        if not system.exists(path):
            return []
        # The log of a table has thousands of files: a few calls for each of them would take seconds.
        paths = self._jvm.org.apache.hadoop.fs.FileUtil.stat2Paths(system.listStatus(path))
        told = str(self._jvm.org.apache.commons.lang3.ArrayUtils.toString(paths))
        folder = f"{system.makeQualified(path).toString().rstrip('/')}/"
        return sorted(filter(None, told[1:-1].removeprefix(folder).split(f",{folder}")))

    def write(self, text: str, *parts: str) -> None:
        """Write a file, or replace it. Every call into the JVM is expensive: the file is written here, then copied."""
        path, system = self._at(*parts)
        if system.exists(path) and system.getFileStatus(path).isDirectory():
            raise PipelineError(f"{path} cannot be written: it is a folder")
        with NamedTemporaryFile("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            system.copyFromLocalFile(False, True, self._make_path(Path(file.name).as_uri()), path)

    def read(self, *parts: str) -> str:
        path, system = self._at(*parts)
        if not system.exists(path):
            raise PipelineError(f"there is no {self.path(*parts)}")
        stream = system.open(path)
        try:
            return bytes(self._jvm.org.apache.hadoop.io.IOUtils.readFullyToByteArray(stream)).decode()
        finally:
            stream.close()

    def _at(self, *parts: str) -> tuple[Any, Any]:
        path = self._make_path(self.path(*parts))
        return path, path.getFileSystem(self._configuration)


Files = Folder | LocalFolder
"""A folder, as an engine opens it."""


LOG: Final = "_delta_log"
_COMMIT: Final = re.compile(r"(\d{20})\.json")


def versions(folder: Files, table: str) -> list[int]:
    """Return the versions of a table in a folder, the newest first; none if it does not exist."""
    return sorted((int(found[1]) for found in map(_COMMIT.fullmatch, folder.names(table, LOG)) if found), reverse=True)


def batches(folder: Files, table: str, writer: str) -> Iterator[tuple[int, int]]:
    """Return version and number of each batch of a writer, the newest first."""
    for version in versions(folder, table):
        for line in folder.read(table, LOG, f"{version:020}.json").splitlines():
            transaction = json.loads(line).get("txn", {}) if '"txn"' in line else {}
            if transaction.get("appId") == writer:
                yield version, int(transaction["version"])


def last(folder: Files, table: str, writer: str) -> int:
    """Return the number of a writer's last batch, -1 if there is none."""
    return next((number for _, number in batches(folder, table, writer)), -1)


def as_of(folder: Files, table: str, writer: str, number: int) -> int:
    """Return the version that holds a batch of a writer and none after it."""
    return next(version for version, each in batches(folder, table, writer) if each <= number)


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

        PipelineError if its tables have lost their state, or are of an earlier release.
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
            raise PipelineError(
                f"{folder.path()!r} holds verdicts without their {STATE!r}, or those of an earlier release: restore "
                f"the table {STATE!r} from a backup, or give another folder"
            )

    def read(self, name: str) -> Frame:
        """Return a table as the last run, or this one, has left it."""
        return self.engine.load(self._folder.path(name), self._versions[name])

    def begin(self, *, anew: bool = False) -> int:
        """Begin a run, and return its number. A run that begins `anew` replaces all rows of earlier ones.

        PipelineError if a table is older than the state says.
        """
        if not self._begun:
            with self._conflicts():
                self.engine.save(self.engine.table([], _COLUMNS), self._folder.path(STATE))
        if anew:
            self._versions = {}
        for name, version in self._versions.items():
            head = self._version(name)
            if head < version:
                raise PipelineError(
                    f"{self._folder.path(name)} has version {head}, and the state names {version}: restore it from the "
                    "same backup as the other tables, or give another folder"
                )
            if head > version:
                with self._conflicts():
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
        """End the run: its tables count from now on. PipelineError if another run has ended in the meantime."""
        run, attempt, path = self.run + 1, uuid4().hex, self._folder.path(STATE)
        row = (run, at, attempt, json.dumps(self._versions), json.dumps(content))
        with self._conflicts():
            self.engine.save(self.engine.table([row], _COLUMNS), path, replace=True, once=Once(_APPLICATION, run))
        [there] = self.engine.rows(self.engine.load(path))
        if there["attempt"] != attempt:
            raise self._conflict()
        self.run, self.content = run, content

    def _commit(self, name: str, change: Any, *, least: int = 1, most: int = 1) -> None:
        """Change a table by a number of commits."""
        before = self._heads[name]
        with self._conflicts():
            change(self._folder.path(name))
        head = self._version(name)
        if not least <= head - before <= most:
            raise self._conflict()
        self._heads[name] = self._versions[name] = head

    def _version(self, name: str) -> int:
        """Return the number of the last commit of a table, -1 if it does not exist."""
        return next(iter(versions(self._folder, name)), -1)

    def _conflict(self) -> PipelineError:
        folder = self._folder.path()
        return PipelineError(f"another audit has written into {folder!r} at the same time: run one at a time")

    @contextmanager
    def _conflicts(self) -> Iterator[None]:
        """Report a commit that Delta refuses because of another one."""
        try:
            yield
        except Exception as error:
            if self.engine.overtaken(error):
                raise self._conflict() from error
            raise
