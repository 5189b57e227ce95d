"""The barrier over a real SQLite: whichever of local transaction and check comes first decides."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from halfway.client.barrier import (
    Barrier,
    InvalidRetentionError,
    LateTransactionError,
    UnsupportedConnectionError,
    carry_out,
    decide,
)
from halfway.client.checks import Check

BARRIER = Barrier("sqlite")


class Shop:
    """A service's database; `begin` is a transaction that commits when its block is left."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self.begin() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            carry_out(BARRIER.create(), connection)

    @contextmanager
    def begin(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path)) as connection, connection:
            yield connection

    def count(self) -> int:
        with self.begin() as connection:
            return int(connection.execute("SELECT count(*) FROM halfway_barrier").fetchone()[0])


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path / "shop.sqlite")


def asked(transaction_id: str, *, age: timedelta = timedelta(0)) -> Check:
    prepared_at = (datetime.now(UTC) - age).isoformat()
    return Check(id=transaction_id, group="shop", prepared_at=prepared_at, attempt=1, messages=[])


async def test_a_check_after_the_commit_says_commit(shop: Shop) -> None:
    with shop.begin() as connection:
        carry_out(BARRIER.insert("a"), connection)
    assert await decide(BARRIER, shop.begin)(asked("a")) == "commit"


async def test_a_check_before_it_says_rollback_for_good(shop: Shop) -> None:
    answer = decide(BARRIER, shop.begin)
    assert await answer(asked("a")) == "rollback"
    with pytest.raises(LateTransactionError, match="roll the local transaction back"), shop.begin() as connection:
        carry_out(BARRIER.insert("a"), connection)
    assert await answer(asked("a")) == "rollback"


async def test_a_check_during_it_says_unknown_and_disturbs_nothing(shop: Shop) -> None:
    answer = decide(BARRIER, shop.begin)
    with shop.begin() as connection:
        carry_out(BARRIER.insert("a"), connection)
        assert await answer(asked("a")) == "unknown"
    assert await answer(asked("a")) == "commit"


async def test_a_local_transaction_that_rolls_back_leaves_no_row(shop: Shop) -> None:
    def local_transaction() -> None:
        with shop.begin() as connection:
            carry_out(BARRIER.insert("a"), connection)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        local_transaction()
    assert await decide(BARRIER, shop.begin)(asked("a")) == "rollback"


async def test_what_may_have_been_cleaned_is_not_answered(shop: Shop) -> None:
    old = asked("a", age=timedelta(days=4))
    assert await decide(BARRIER, shop.begin)(old) == "unknown"
    with shop.begin() as connection:
        carry_out(BARRIER.insert("a"), connection)
    assert await decide(BARRIER, shop.begin)(old) == "commit"


def test_cleaning_is_bounded_and_spares_what_is_young(shop: Shop) -> None:
    with shop.begin() as connection:
        for number in range(10):
            carry_out(BARRIER.insert(f"old-{number}"), connection)
        connection.execute("UPDATE halfway_barrier SET decided_at = decided_at - 8 * 86400")
        carry_out(BARRIER.insert("young"), connection)
    for deleted in (7, 3, 0):
        with shop.begin() as connection:
            assert carry_out(BARRIER.clean(7), connection) == deleted
    assert shop.count() == 1


def test_what_was_decided_lately_is_listed_for_reconciling(shop: Shop) -> None:
    with shop.begin() as connection:
        carry_out(BARRIER.insert("a"), connection)
        connection.execute("UPDATE halfway_barrier SET decided_at = decided_at - 60")
        carry_out(BARRIER.insert("b"), connection)
        assert carry_out(BARRIER.decided(from_s=3600, to_s=30, limit=10), connection) == [("a", "commit")]


def test_a_retention_below_what_halfway_may_ask_for_is_refused() -> None:
    BARRIER.check_policy({"max_age_s": 43_200})
    with pytest.raises(InvalidRetentionError, match="retention_s of 1200000 or more"):
        BARRIER.check_policy({"max_age_s": 600_000})


def test_bad_use_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lower-case name"):
        Barrier("sqlite", table="x; DROP TABLE orders")
    with pytest.raises(ValueError, match="oracle"):
        Barrier("oracle")
    with pytest.raises(UnsupportedConnectionError, match="sqlite3, psycopg"):
        carry_out(BARRIER.create(), tmp_path)
