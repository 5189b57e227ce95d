"""The tables of an audit: what a run writes is one transaction, on either engine and beside another run."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from halfway.pipeline.engines import duckdb
from halfway.pipeline.engines.dialect import Merge
from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.engines.engine import Engine, SparkEngine
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.tables import EVENTS, TABLES, VERDICTS, LocalFolder, Tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROW = "id string, run bigint"
RULE = Merge(same="old.id = new.id", deletes="false", replaces="true", begins="true")
REFUSED = "another audit has written into .* at the same time: run one at a time"


@pytest.fixture(params=["spark-spark", "spark-duckdb", "duckdb-spark", "duckdb-duckdb"])
def engines(request: pytest.FixtureRequest, spark: "SparkSession") -> tuple[Engine, ...]:
    """Return the engines of two audits over one folder."""
    return tuple(SparkEngine(spark) if name == "spark" else DuckEngine() for name in request.param.split("-"))


def ids(tables: Tables, name: str) -> list[str]:
    return sorted(row["id"] for row in tables.engine.rows(tables.read(name)))


def test_of_two_runs_the_one_that_commits_second_fails_and_the_other_counts(
    engines: tuple[Engine, ...], tmp_path: Path
) -> None:
    """At its first commit to any table, or at the end. A third run begins where the one that counts has ended."""
    folder = LocalFolder(str(tmp_path))

    def begun(engine: Engine) -> Tables:
        tables = Tables(engine, folder)
        tables.begin()
        return tables

    def rows(tables: Tables, *names: str) -> object:
        return tables.engine.table([(name, tables.run + 1) for name in names], ROW)

    def two() -> tuple[Tables, Tables]:
        first, second = map(begun, engines)
        return first, second

    first, second = two()
    first.write(VERDICTS, rows(first, "a"))
    with pytest.raises(PipelineError, match=REFUSED):
        second.write(VERDICTS, rows(second, "b"))
    first.write(EVENTS, rows(first, "a"))
    first.end({}, at=1)
    # The last one of a run that did not end is not read, and is taken back by the next run.
    assert ids(Tables(engines[1], folder), VERDICTS) == ["a"]
    first, second = two()
    assert ids(second, VERDICTS) == ["a"]
    second.merge(VERDICTS, rows(second, "a", "c"), RULE)
    with pytest.raises(PipelineError, match=REFUSED):
        first.merge(VERDICTS, rows(first, "d"), RULE)
    second.end({"of": "second"}, at=2)
    with pytest.raises(PipelineError, match=REFUSED):
        first.end({"of": "first"}, at=2)
    for engine in engines:
        last = begun(engine)
        assert (last.run, last.content) == (1, {"of": "second"})
        assert ids(last, VERDICTS) == ["a", "c"]
        assert ids(last, EVENTS) == ["a"]
        engine.close()


def test_of_two_runs_that_take_back_the_same_commits_at_once_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed run has left them. The error is that of any other conflict."""
    folder, engine = LocalFolder(str(tmp_path)), DuckEngine()
    for number in range(2):
        tables = Tables(engine, folder)
        tables.begin()
        tables.write(VERDICTS, engine.table([("a", number)], ROW))
        if number == 0:
            tables.end({}, at=0)
    stale, second = DeltaTable(tmp_path / VERDICTS), Tables(engine, folder)
    Tables(engine, folder).begin()
    monkeypatch.setattr(duckdb, "_table", lambda *_: stale)
    with pytest.raises(PipelineError, match=REFUSED):
        second.begin()
    engine.close()


@pytest.mark.parametrize("name", ["spark", "duckdb"])
def test_an_error_that_only_speaks_of_concurrency_is_no_conflict(
    spark: "SparkSession", tmp_path: Path, name: str
) -> None:
    """It is reported as it is: whoever read of another audit would look for one that never ran."""
    engine: Engine = SparkEngine(spark) if name == "spark" else DuckEngine()
    tables = Tables(engine, LocalFolder(str(tmp_path)))
    tables.begin()
    text = "KafkaConsumer is not safe for concurrent access"
    fails = f"{'raise_error' if name == 'spark' else 'error'}('{text}')"
    with pytest.raises(Exception, match=text) as raised:
        tables.write(VERDICTS, engine.query(f"select cast({fails} as bigint) as run"))
    assert not isinstance(raised.value, PipelineError)
    engine.close()


@pytest.mark.parametrize("engines", ["spark-duckdb", "duckdb-spark"], indirect=True)
def test_the_tables_are_tidied_without_a_word(
    engines: tuple[Engine, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The stdout of a job is for its result alone. The other engine reads what is left, and goes on."""
    folder = LocalFolder(str(tmp_path))
    for number, engine in enumerate(engines):
        tables = Tables(engine, folder)
        tables.begin()
        tables.run = 99
        tables.write(EVENTS, engine.table([(f"{number}-{run}", run) for run in range(2)], ROW))
        tables.tidy({EVENTS: "run < 1"})
        tables.run = number - 1
        tables.end({}, at=number)
    assert ids(Tables(engines[0], folder), EVENTS) == ["0-1", "1-1"]
    assert capfd.readouterr().out == ""
    assert {each.name for each in tmp_path.iterdir()} <= {*TABLES, "state"}
    for engine in engines:
        engine.close()
