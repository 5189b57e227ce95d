"""The Spark session of a job: local by default, else as spark-submit has configured it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from halfway.pipeline.engines import java, spark_connector

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_HIDDEN_OPTIONS: Final = "(?i)url|jaas|password|secret|token|keystore"
# Spark's own pattern, and logins and keys, which it would show.
_HIDDEN_SETTINGS: Final = "(?i)secret|password|token|access[.]?key|jaas|keystore|ssl[._]key|_pem|[.]pem"
GATEWAY: Final = "PYSPARKGATEWAY_PORT"
"""The variable that spark-submit sets for the Python program that it starts."""


@dataclass(frozen=True, kw_only=True)
class SparkOptions:
    """The options of the command line for Spark. None leaves a setting to Spark's own configuration."""

    master: str | None = None
    memory: str | None = None
    connector_version: str = spark_connector.DEFAULT_VERSION
    jars: Sequence[str] = ()
    """The jars of the connector. Without any they are resolved by name."""
    conf: Mapping[str, str] = field(default_factory=dict)


def prepared(name: str, options: SparkOptions, *, kafka: bool = True) -> Callable[[], SparkSession]:
    """Return a function that starts a session, or takes the one of spark-submit. It downloads nothing.

    Raises:
        JavaError: Spark does not run on the Java of this machine.
        ConnectorError: `kafka` is true, and the Kafka connector is not available.

    """
    submitted = GATEWAY in os.environ
    # At DEBUG py4j logs everything that goes to the JVM, passwords too.
    logging.getLogger("py4j").setLevel(logging.INFO)
    if not submitted:
        java.require()
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    for key, value in _settings(options, submitted=submitted, kafka=kafka).items():
        builder = builder.config(key, value)

    def start() -> SparkSession:
        spark: SparkSession = builder.getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        return spark

    return start


def _settings(options: SparkOptions, *, submitted: bool, kafka: bool) -> dict[str, str]:
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.redaction.regex": _HIDDEN_SETTINGS,
        "spark.sql.redaction.options.regex": _HIDDEN_OPTIONS,
        "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
        # A parked record has a whole payload, so batches are bounded in bytes too.
        "spark.sql.execution.arrow.maxBytesPerBatch": str(64 << 20),
        "spark.sql.sources.partitionOverwriteMode": "static",
        # The default is a type without statistics, so readers could not skip files.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        # Otherwise PySpark makes several calls into the JVM for the line of Python that each column comes from.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        # A stage without rows would be removed from the plan, together with the counts that it observes.
        "spark.sql.adaptive.optimizer.excludedRules": (
            "org.apache.spark.sql.execution.adaptive.AQEPropagateEmptyRelation"
        ),
    }
    if not submitted:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        cores = os.cpu_count() or 2
        settings |= {
            "spark.master": options.master or "local[*]",
            "spark.driver.memory": options.memory or "2g",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": str(max(4, 2 * cores)),
            # A few parts of much data would not fit into memory. Spark combines parts of little data again.
            "spark.sql.adaptive.coalescePartitions.initialPartitionNum": "200",
        }
        if options.master is not None and not options.master.startswith("local"):
            # On a cluster other machines must reach the driver, and this machine's cores do not size the shuffle.
            for key in (
                "spark.driver.bindAddress",
                "spark.driver.host",
                "spark.sql.shuffle.partitions",
                "spark.sql.adaptive.coalescePartitions.initialPartitionNum",
            ):
                del settings[key]
        if kafka:
            settings["spark.jars"] = ",".join(options.jars or map(str, spark_connector.jars(options.connector_version)))
    return settings | dict(options.conf)
