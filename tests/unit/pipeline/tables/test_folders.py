"""Small files beside tables."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from halfway.pipeline.engines.dialect import Merge
from halfway.pipeline.engines.engine import SparkEngine
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.tables import Folder, LocalFolder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_file_that_cannot_take_its_place_is_an_error(spark: "SparkSession", tmp_path: Path) -> None:
    """Nothing is believed to be written that is not."""
    (tmp_path / "summary.json" / "in the way").mkdir(parents=True)
    with pytest.raises(PipelineError, match="is a folder"):
        Folder(spark, str(tmp_path)).write("text", "summary.json")


def test_the_names_in_a_folder_are_the_same_with_and_without_spark(spark: "SparkSession", tmp_path: Path) -> None:
    """Whatever characters they have; a folder that is empty, or not there, has none."""
    names = ["a b", "a,b", "a%20b", "é", "{x}", "y", "z,"]
    for name in names:
        (tmp_path / "odd [%20]" / name).mkdir(parents=True)
    for uri in (str(tmp_path), tmp_path.as_uri()):
        for folder in (Folder(spark, uri), LocalFolder(uri)):
            assert folder.names("odd [%20]") == sorted(names)
            assert folder.names("odd [%20]", "y") == folder.names("nowhere") == []


def test_a_table_of_spark_can_have_a_relative_path(spark: "SparkSession", tmp_path: Path) -> None:
    """As the commands of the page have: from where Spark was started."""
    folder, engine = Folder(spark, os.path.relpath(tmp_path)), SparkEngine(spark)
    path, rows = folder.path("table"), engine.table([("a",)], "id string")
    engine.save(rows, path)
    engine.merge(rows, path, Merge(same="old.id = new.id", deletes="true", replaces="true", begins="true"))
    engine.restore(path, 0)
    assert engine.rows(engine.load(str(tmp_path / "table"))) == [{"id": "a"}]
