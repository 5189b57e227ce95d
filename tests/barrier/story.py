"""Seeded stories: local transactions, checks, late commits, crashes and repeats, interleaved step by step.

A story is about one transaction id. The same seed gives the same steps in the same order. One thread plays it, so who
waits for a lock waits in vain: waits are short. What must hold: no two verdicts differ, and the verdict is commit
exactly if one local transaction has committed.
"""

import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pymysql

from halfway.client import Check
from halfway.client.barrier import Barrier, ConflictError, LateTransactionError
from halfway.client.barrier.drivers import carry_out
from tests.support.databases.servers import Server

ERRORS = (psycopg.Error, pymysql.Error, sqlite3.Error, ConflictError, LateTransactionError)
DECIDED_WITHIN_S = 180.0
_LOOK_AGAIN_S = 0.01
Actor = Iterator[None]


@dataclass(kw_only=True)
class Database:
    """One database at one isolation level; the mark stands for a placeholder of its driver."""

    dialect: str
    level: str
    connect: Callable[[], Any]
    mark: str = "%s"
    begin: str | None = None
    """What a local transaction begins with, if its driver begins none before a read."""
    patience: str | None = None
    """Lets a connection wait for locks, of the server's own cleaning or of the stories beside it, and read what was
    committed, at whatever level the stories are."""
    barrier: Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.dialect, self.transaction)
        Barrier(self.dialect, self._patient_transaction).create()
        with self._patient_transaction() as connection:
            connection.cursor().execute("CREATE TABLE IF NOT EXISTS stock (item int PRIMARY KEY)")
            connection.cursor().execute(
                "CREATE TABLE IF NOT EXISTS effects"
                " (transaction_id varchar(128), attempt int, PRIMARY KEY (transaction_id, attempt))"
            )

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        connection = self.connect()
        try:
            yield connection
            connection.commit()
        finally:
            connection.close()

    @contextmanager
    def _patient_transaction(self) -> Iterator[Any]:
        with self.transaction() as connection:
            if self.patience is not None:
                connection.cursor().execute(self.patience)
            yield connection

    def effects(self, transaction_id: str) -> int:
        with self._patient_transaction() as connection:
            cursor = connection.cursor()
            cursor.execute(f"SELECT count(*) FROM effects WHERE transaction_id = {self.mark}", (transaction_id,))  # noqa: S608
            return int(cursor.fetchone()[0])


def postgresql(server: Server, isolation: str) -> Database:
    level = psycopg.IsolationLevel[isolation.replace(" ", "_")]

    def connect() -> Any:
        connection = server.psycopg(options="-c lock_timeout=10")
        connection.isolation_level = level
        return connection

    patience = "SET lock_timeout = 0; SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
    return Database(dialect="postgresql", level=isolation, connect=connect, patience=patience)


def mariadb(server: Server, isolation: str) -> Database:
    def connect() -> Any:
        settings = (
            f"SET SESSION innodb_lock_wait_timeout = 0, SESSION transaction_isolation = '{isolation.replace(' ', '-')}'"
        )
        return server.pymysql(init_command=settings)

    patience = "SET SESSION innodb_lock_wait_timeout = 30, SESSION transaction_isolation = 'READ-COMMITTED'"
    return Database(dialect="mysql", level=isolation, connect=connect, patience=patience)


def sqlite(folder: Path, begin: str, journal: str) -> Database:
    path = folder / f"{begin}-{journal}.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA journal_mode = {journal}")
    connection.close()

    def connect() -> Any:
        connection = sqlite3.connect(path, timeout=0.01, isolation_level=begin)  # type: ignore[call-overload]  # a name
        with suppress(sqlite3.OperationalError):  # it reads the file, which a check may have locked
            connection.execute("PRAGMA synchronous = OFF")  # no machine crashes here
        return connection

    return Database(dialect="sqlite", level=begin, connect=connect, mark="?", begin=f"BEGIN {begin}")


class Story:
    """One seed's interleaving."""

    def __init__(self, database: Database, seed: int) -> None:
        self._database = database
        self._random = random.Random(seed)
        self._id = f"{database.level.replace(' ', '-')}-{seed}"
        self._check = Check(
            id=self._id, group="shop", prepared_at=datetime.now(UTC).isoformat(), attempt=1, messages=[]
        )
        self.verdicts: list[str] = []
        self.steps: list[str] = []

    def play(self) -> None:
        """Play it to its end; raises AssertionError if database and verdicts contradict each other."""
        actors = {f"local-{number}": self._local(number) for number in range(self._random.choice([1, 1, 2]))}
        actors |= {f"check-{number}": self._asked() for number in range(self._random.choice([1, 2, 3]))}
        while actors:
            name = self._random.choice(sorted(actors))
            self.steps.append(name)
            try:
                next(actors[name])
            except StopIteration:
                del actors[name]
        deadline = time.monotonic() + DECIDED_WITHIN_S
        # What else goes on in the database may hold it up.
        while (verdict := self._database.barrier.decide(self._check)) == "unknown" and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)
        self.verdicts.append(verdict)
        effects = self._database.effects(self._id)
        right = {0: {"rollback"}, 1: {"commit"}}
        assert set(self.verdicts) == right.get(effects), (
            f"{effects} local transactions committed, and the verdicts are {self.verdicts}: {self.steps}"
        )

    def _local(self, number: int) -> Actor:
        connection = self._database.connect()
        cursor = connection.cursor()

        def look() -> None:
            cursor.execute("SELECT count(*) FROM stock")
            cursor.fetchall()

        def effect() -> None:
            sql = f"INSERT INTO effects VALUES ({self._database.mark}, {number})"  # noqa: S608 - no input
            cursor.execute(sql, (self._id,))

        def mark() -> None:
            self._database.barrier.insert(connection, self._id)

        work = self._random.choice([[look, effect, mark], [effect, mark], [mark, effect], [look, mark, effect]])
        end = self._random.choice(["commit", "commit", "commit", "rollback", "crash"])
        crash_after = self._random.randrange(len(work)) if end == "crash" else None
        try:
            if self._database.begin is not None:
                connection.isolation_level = None
                cursor.execute(self._database.begin)
            for done, step in enumerate(work):
                yield
                step()
                if done == crash_after:
                    return
            yield
            if end == "commit":
                connection.commit()
            else:
                connection.rollback()
        except ERRORS as error:
            self.steps.append(type(error).__name__)
        finally:
            connection.close()

    def _asked(self) -> Actor:
        """Answer a check with pauses between its transactions and before each commit, or die at one of them."""
        decision = self._database.barrier._decision(self._check.id, self._check.prepared_at)
        crash_after = self._random.choice([0, 1, None, None, None, None])
        transactions = 0
        try:
            steps = next(decision)
            while True:
                connection = self._database.connect()
                try:
                    result = carry_out(steps, connection)
                    yield
                    if transactions == crash_after:
                        return
                    connection.commit()
                except ERRORS as error:
                    steps = decision.throw(error)
                else:
                    transactions += 1
                    yield
                    steps = decision.send(result)
                finally:
                    connection.close()
        except StopIteration as end:
            self.steps.append(end.value)
            if end.value != "unknown":
                self.verdicts.append(end.value)


def play_all(databases: list[Database], first_seed: int, count: int) -> dict[str, int]:
    """Play `count` stories, side by side if there are several databases; return how often each verdict came."""

    def part(number: int) -> dict[str, int]:
        verdicts = {"commit": 0, "rollback": 0}
        for seed in range(first_seed + number, first_seed + count, len(databases)):
            story = Story(databases[number], seed)
            try:
                story.play()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from None
            verdicts[story.verdicts[-1]] += 1
        return verdicts

    with ThreadPoolExecutor(len(databases)) as pool:
        parts = list(pool.map(part, range(len(databases))))
    return {verdict: sum(each[verdict] for each in parts) for verdict in ("commit", "rollback")}
