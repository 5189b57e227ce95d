"""Old rows are deleted beside local transactions: no deadlock, and they hardly wait."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest

from halfway.client.barrier import Barrier, BarrierMaintenance
from tests.support.databases.servers import Server

ROWS = int(os.environ.get("HALFWAY_TEST_CLEANING_ROWS", "10000"))
MEASURED = ROWS >= 1_000_000
OLD_ROWS = ROWS // 2
WINDOWS = 5 if MEASURED else 1
"""Of each kind, in turn: with the cleaning and without."""
WINDOW_S = 10.0 if MEASURED else 2.0
CALLERS = 4
PAUSE_S = 0.01
INSTANCES = 2
FILL_WITHIN_S = 600
TABLE = "cleaned"

pytestmark = [pytest.mark.xdist_group("databases"), pytest.mark.timeout(600 + FILL_WITHIN_S * MEASURED)]

FILL = {
    "postgresql": (
        f"DROP INDEX {TABLE}_decided_at",
        (
            f"INSERT INTO {TABLE} SELECT md5(n::text), 'commit', now() - CASE WHEN n <= {OLD_ROWS} THEN"  # noqa: S608 - no input
            f" interval '8 days' ELSE interval '6 days' END + n * interval '1 ms' FROM generate_series(1, {ROWS}) AS n"
        ),
        f"CREATE INDEX {TABLE}_decided_at ON {TABLE} (decided_at)",
        f"ANALYZE {TABLE}",
    ),
    "mysql": (
        f"ALTER TABLE {TABLE} DROP KEY {TABLE}_decided_at",
        (
            f"INSERT INTO {TABLE} SELECT MD5(seq), 'commit', NOW(3) - INTERVAL IF(seq <= {OLD_ROWS}, 8, 6) DAY"  # noqa: S608 - no input
            f" + INTERVAL seq * 1000 MICROSECOND FROM seq_1_to_{ROWS} ORDER BY 1"
        ),
        f"ALTER TABLE {TABLE} ADD KEY {TABLE}_decided_at (decided_at)",
    ),
}


@pytest.mark.parametrize("dialect", ["postgresql", "mysql"])
def test_cleaning_beside_local_transactions(servers: dict[str, Server], dialect: str) -> None:
    """Two instances clean while callers insert. `make cleaning` does it on 5 million rows, and compares the waiting."""
    connect = servers[dialect].psycopg if dialect == "postgresql" else servers[dialect].pymysql

    @contextmanager
    def begin() -> Iterator[Any]:
        connection = connect()
        try:
            yield connection
            connection.commit()
        finally:
            connection.close()

    barrier = Barrier(dialect, begin, table=TABLE)
    barrier.create()
    try:
        for sql in FILL[dialect]:
            with begin() as connection:
                connection.cursor().execute(sql)
        before = count(begin)
        waits: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(WINDOWS):
            for cleaning in (True, False):
                waits[cleaning] += window(barrier, connect, cleaning=cleaning)
        written = len(waits[True]) + len(waits[False])
        deleted = before + written - count(begin)
    finally:
        with begin() as connection:
            connection.cursor().execute(f"DROP TABLE {TABLE}")
    beside, alone = p99_ms(waits[True]), p99_ms(waits[False])
    told = (
        f"{dialect}: {ROWS} rows, {deleted} deleted; p99 of {written} inserts {beside:.2f} ms beside it, {alone:.2f} ms"
    )
    print(told)  # noqa: T201 - what the long run tells
    assert deleted == OLD_ROWS if not MEASURED else deleted > 0
    if MEASURED:
        assert beside <= 2 * alone, told


def window(barrier: Barrier, connect: Callable[[], Any], *, cleaning: bool) -> list[float]:
    """Insert rows for a while; return how long each local transaction took. Whatever a driver raises is raised."""
    ends = threading.Event()

    def call() -> list[float]:
        waits: list[float] = []
        connection = connect()
        try:
            while not waits or not ends.is_set():
                began = time.perf_counter()
                barrier.insert(connection, uuid4().hex)
                connection.commit()
                waits.append(time.perf_counter() - began)
                time.sleep(PAUSE_S)
        finally:
            connection.close()
        return waits

    async def clean() -> None:
        instances = [BarrierMaintenance(Mock(), barrier) for _ in range(INSTANCES)]
        work = asyncio.gather(*(instance.clean() for instance in instances))
        if MEASURED:
            await asyncio.wait({work}, timeout=WINDOW_S)
            assert not work.done() or work.exception(), "all old rows were deleted before the window's end"
            work.cancel()
        with suppress(asyncio.CancelledError):
            await work

    with ThreadPoolExecutor(CALLERS) as pool:
        calls = [pool.submit(call) for _ in range(CALLERS)]
        try:
            asyncio.run(clean() if cleaning else asyncio.sleep(WINDOW_S))
        finally:
            ends.set()
        return [wait for one in calls for wait in one.result()]


def count(begin: Callable[[], Any]) -> int:
    with begin() as connection:
        cursor = connection.cursor()
        cursor.execute(f"SELECT count(*) FROM {TABLE}")  # noqa: S608 - no input
        return int(cursor.fetchone()[0])


def p99_ms(waits: list[float]) -> float:
    return sorted(waits)[int(len(waits) * 0.99)] * 1000
