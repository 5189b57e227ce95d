"""The questions of `pipeline/sql`: each gets the same answer from both engines, and it is the right one."""

import random
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from halfway.pipeline import tables as runs
from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.engines.engine import SparkEngine
from halfway.pipeline.jobs import audit
from tests.support.pipeline.archives import rows_in
from tests.support.pipeline.audits import OPTIONS
from tests.support.pipeline.logs import START
from tests.support.pipeline.worlds import Worlds, WorldSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows = list[dict[str, Any]]
Answers = dict[str, list[tuple[Any, ...]]]
QUESTIONS = sorted((Path(__file__).parents[3] / "pipeline" / "sql").glob("*.sql"))
OF_LEDGER = ("ended", "pending", "quarantine")
SEED = 5


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Rows]]:
    """Return the tables of an audit of a small world with planted anomalies, and those of a ledger."""
    folder, chance, world = tmp_path_factory.mktemp("tables"), random.Random(SEED), Worlds(SEED, 1)
    for number, anomaly in enumerate(("lost", "torn", "doubled", "leaked")):
        world.plant(anomaly, ago=3_600_000 + number * 60_000)
    engine = DuckEngine()
    audit.run(engine, WorldSource(engine, world, world.end, lambda: 1), runs.LocalFolder(str(folder)), OPTIONS)
    engine.close()
    for name in OF_LEDGER:
        rows = pa.Table.from_pylist([row(name, number, chance) for number in range(200)])
        write_deltalake(folder / f"ledger-{name}", rows)
    made = {name: (folder / name, rows_in(folder, name)) for name in (runs.VERDICTS, runs.ANOMALIES)}
    return made | {name: (folder / f"ledger-{name}", []) for name in OF_LEDGER}


def row(name: str, number: int, chance: random.Random) -> dict[str, Any]:
    at = datetime.fromtimestamp(START / 1000 + chance.randrange(3 * 86_400), UTC)
    of_ended = {
        "outcome": chance.choice(("committed", "rolled_back")),
        "cause": chance.choice(("producer", "check", "operator", "policy")),
        "latency_ms": chance.randrange(10_000),
        "messages": chance.randrange(1, 5),
        "size": chance.randrange(100),
    }
    more: dict[str, dict[str, Any]] = {
        "ended": {"ended_at": at, "ended_date": at.date(), **of_ended},
        "pending": {"state": chance.choice(("prepared", "parked")), "since": number},
        "quarantine": {"topic": "op", "partition": 0, "offset": number, "error": chance.choice(("no key", "odd"))},
    }
    return {"id": f"tx-{number}", "group": chance.choice("gh"), **more[name]}


def plain(value: Any) -> Any:
    """Return a value in the form that both engines share."""
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    return round(float(value), 6) if isinstance(value, float) or hasattr(value, "as_tuple") else value


def in_order(found: Rows) -> list[tuple[Any, ...]]:
    return sorted((tuple(map(plain, row.values())) for row in found), key=repr)


@pytest.fixture(scope="module")
def of_duckdb(tables: dict[str, tuple[Path, Rows]]) -> Answers:
    engine = DuckEngine()
    engine.database.execute("set timezone = 'UTC'")
    for name, (path, _) in tables.items():
        engine.database.execute(f"create temp view {name} as {engine._whole(engine.load(str(path)))}")
    asked = {each.stem: engine.database.sql(each.read_text()).to_arrow_table().to_pylist() for each in QUESTIONS}
    engine.close()
    return {name: in_order(found) for name, found in asked.items()}


def test_the_answers_are_those_of_the_tables(tables: dict[str, tuple[Path, Rows]], of_duckdb: Answers) -> None:
    """Ten questions, each with an answer; what was planted is among it."""
    assert len(of_duckdb) == 10
    assert all(of_duckdb.values()), of_duckdb
    verdicts, anomalies = tables[runs.VERDICTS][1], tables[runs.ANOMALIES][1]
    assert {one[:2] for one in of_duckdb["how_transactions_ended"]} == set(
        Counter(r["group"] for r in verdicts).items()
    )
    assert Counter(one[2] for one in of_duckdb["anomalies_by_day"]).keys() == {r["verdict"] for r in anomalies}
    assert {one[0] for one in of_duckdb["incomplete_transactions"]} == {
        r["id"] for r in anomalies if r["verdict"] in ("lost", "torn", "doubled") and r["expected"]
    }
    for name, count in {"time_to_end": 1, "what_is_open": 2, "unreadable_records": 2}.items():
        assert sum(one[count] for one in of_duckdb[name]) == 200, name


def test_spark_gives_the_same_answers(
    spark: "SparkSession", tables: dict[str, tuple[Path, Rows]], of_duckdb: Answers
) -> None:
    """To the row."""
    for name, (path, _) in tables.items():
        SparkEngine(spark).load(str(path)).createOrReplaceTempView(name)
    for each in QUESTIONS:
        assert in_order(spark.sql(each.read_text()).toArrow().to_pylist()) == of_duckdb[each.stem], each.stem
