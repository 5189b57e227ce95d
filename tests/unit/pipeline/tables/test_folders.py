"""Small files beside tables."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from halfway.pipeline.errors import SourceError
from halfway.pipeline.tables.folders import Folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_file_that_cannot_take_its_place_is_an_error(spark: "SparkSession", tmp_path: Path) -> None:
    """Nothing is believed to be written that is not."""
    (tmp_path / "summary.json" / "in the way").mkdir(parents=True)
    with pytest.raises(SourceError, match="is a folder"):
        Folder(spark, str(tmp_path)).write("text", "summary.json")
