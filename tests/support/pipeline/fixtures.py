"""The one Spark session of the tests, local and small.

Tests that ask for it run in one worker, so that there is only one. Without a Java that Spark can run on they fail with
what to install; nothing is skipped.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result
from py4j.java_gateway import java_import

from halfway.pipeline import cli
from halfway.pipeline.commands import running
from halfway.pipeline.engines.spark_session import prepared

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# pyspark.testing imports pandas on Spark, which warns where this is not set.
os.environ.setdefault("PYARROW_IGNORE_TIMEZONE", "1")

# With one compiler there are 48 MiB for what it makes by default: when they are full nothing more is compiled.
CODE_CACHE = "-XX:ReservedCodeCacheSize=240m"
QUICK_JVM = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote "
    f"{CODE_CACHE}"
)
"""For a JVM that does little: what a second compiler and a parallel collector would win is less than they cost."""

INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # By default Delta divides the state of each table into 50 parts, and computes it again for a checksum.
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.databricks.delta.writeChecksumFile.enabled": "false",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
}
"""For small data and many plans: compiling each of them costs more than it saves, and so does dividing them."""

QUICK = INTERPRETED | {
    # To plan again after each stage costs an eighth of such a job. Those on the tests' cluster do it.
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.extraJavaOptions": QUICK_JVM,
    "spark.python.daemon.module": "tests.support.pipeline.spark_daemon",
    "spark.executorEnv.PYTHONPATH": str(Path(__file__).resolve().parents[3]),
}
"""For a job of the tests."""

LOCAL = QUICK | {
    "spark.master": "local[2]",
    "spark.driver.memory": "2g",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.coalescePartitions.initialPartitionNum": "2",
    "spark.default.parallelism": "2",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # Plans name the tables that they read whole.
    "spark.sql.maxMetadataStringLength": "1000",
}


def without_spark() -> dict[str, str]:
    """Return the variables for a job in a process of its own: in this process Spark's gateway runs already."""
    names = ("HALFWAY_", "PYSPARK_", "SPARK_", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if not name.startswith(names)}


def as_options(conf: Mapping[str, str]) -> list[str]:
    """Return Spark's configuration as the command line takes it."""
    return [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]


def assert_same_rows(found: "DataFrame", wanted: "DataFrame") -> None:
    """Compare rows in any order, and their types."""
    from pyspark.testing import assertDataFrameEqual  # it imports pandas, half a second of CPU in each worker

    assertDataFrameEqual(found, wanted)


@pytest.hookimpl(tryfirst=True)  # xdist must see the mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests with Spark together, and give the first of them time for the session's start.

    PySpark leaves the sockets of its results to the garbage collector.
    """
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))
            item.add_marker(pytest.mark.timeout(1800))
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


Command = Callable[..., Result]


@pytest.fixture
def command(spark: "SparkSession", monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs `halfway-pipeline` with arguments and variables, in the session of the tests."""
    monkeypatch.setattr(running, "prepared", lambda *_, **__: lambda: spark)
    monkeypatch.setattr(spark, "stop", lambda: None)

    def run(*arguments: str, **variables: str) -> Result:
        with monkeypatch.context() as patched:
            for name, value in variables.items():
                patched.setenv(name, value)
            return CliRunner().invoke(cli.pipeline, arguments)

    return run


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SparkSession]":
    """Return the session, with the Kafka connector."""
    folder = tmp_path_factory.mktemp("spark")
    conf = LOCAL | {"spark.local.dir": str(folder), "spark.sql.warehouse.dir": str(folder / "warehouse")}
    started = prepared("halfway-tests", conf)()
    for name in ("api.python.PythonUtils", "sql.api.python.PythonSQLUtils", "sql.functions"):
        # PySpark names them without their packages, and each time all jars would be searched for them.
        java_import(started._jvm, f"org.apache.spark.{name}")
    yield started
    started.stop()
