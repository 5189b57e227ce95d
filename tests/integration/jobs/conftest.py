"""An engine for the tests of jobs."""

from collections.abc import Iterator

import pytest

from halfway.pipeline.engines.duckdb import DuckEngine


@pytest.fixture
def engine() -> Iterator[DuckEngine]:
    made = DuckEngine()
    yield made
    made.close()
