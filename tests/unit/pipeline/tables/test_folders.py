"""Small files beside tables."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest

from halfway.pipeline.errors import SourceError
from halfway.pipeline.tables.folders import Folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_file_that_is_written_again_is_there_at_every_moment(spark: "SparkSession", tmp_path: Path) -> None:
    """Whoever reads it finds the old one or the new one, whole."""
    folder, file, ended = Folder(spark, str(tmp_path)), tmp_path / "summary.json", Event()
    texts = {str(number) * 1_000 for number in range(10)}
    folder.write("0" * 1_000, file.name)

    def read() -> set[str]:
        found = set()
        while not ended.is_set():
            found.add(file.read_text())
        return found

    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read)
        try:
            for number in range(50):
                folder.write(str(number % 10) * 1_000, file.name)
        finally:
            ended.set()
        assert reading.result(timeout=60) <= texts
    assert folder.read(file.name) == "9" * 1_000
    assert folder.names() == [file.name]


def test_a_file_that_is_not_written_to_its_end_leaves_the_one_that_was_there(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """Half a file is none."""
    folder = Folder(spark, str(tmp_path))
    folder.write("whole", "rows.csv")

    def write() -> None:
        with folder.writing("rows.csv") as file:
            file.write("ha" * 1_000_000)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write()
    assert folder.read("rows.csv") == "whole"


def test_a_file_that_cannot_take_its_place_is_an_error(spark: "SparkSession", tmp_path: Path) -> None:
    """Nothing is believed to be written that is not."""
    (tmp_path / "summary.json" / "in the way").mkdir(parents=True)
    with pytest.raises(SourceError, match="is a folder"):
        Folder(spark, str(tmp_path)).write("text", "summary.json")


def test_a_file_is_replaced_on_other_file_systems_than_a_local_one(spark: "SparkSession", tmp_path: Path) -> None:
    """In the step that Hadoop has for it (as on HDFS; here by a view of a folder)."""
    configuration: Any = spark.sparkContext._jsc
    configuration.hadoopConfiguration().set("fs.viewfs.mounttable.view.link./seen", tmp_path.as_uri())
    folder = Folder(spark, "viewfs://view/seen")
    for text in ("first", "second"):
        folder.write(text, "offsets.json")
        assert folder.read("offsets.json") == text
    assert folder.names() == ["offsets.json"]
