"""What an engine keeps."""

from typing import TYPE_CHECKING

from halfway.pipeline.engines.engine import SparkEngine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_what_is_kept_is_planned_without_what_led_to_it(spark: "SparkSession") -> None:
    """On one machine: the rules use it often, and each use would be planned from the topics on."""
    engine = SparkEngine(spark)
    kept = engine.keep(engine.query("select id * 2 as twice from $numbers", numbers=spark.range(3)))
    used = engine.query("select sum(twice) as all from $kept", kept=kept)
    assert "Range" not in used._jdf.queryExecution().toString()
    assert engine.rows(used) == [{"all": 6}]
    engine.close()
