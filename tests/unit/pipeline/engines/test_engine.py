"""What an engine keeps."""

from typing import TYPE_CHECKING

import pytest

from halfway.pipeline.engines import engine as engines
from halfway.pipeline.engines.engine import SparkEngine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.parametrize("one_machine", [True, False], ids=["one machine", "cluster"])
def test_what_is_kept_is_computed_once_and_planned_without_what_led_to_it(
    spark: "SparkSession", monkeypatch: pytest.MonkeyPatch, *, one_machine: bool
) -> None:
    """The rules use it often: each use would be read and planned from the topics on."""
    monkeypatch.setattr(engines, "is_one_machine", lambda _: one_machine)
    engine = SparkEngine(spark)
    kept = engine.keep(engine.query("select id, uuid() as made from $numbers", numbers=spark.range(3)))
    first, again = (engine.query("select made from $kept order by id", kept=kept) for _ in range(2))
    assert "Range" not in first._jdf.queryExecution().toString()
    assert len(engine.rows(first)) == 3
    assert engine.rows(first) == engine.rows(again)
    engine.close()
