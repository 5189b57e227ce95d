"""The Spark session of a job: local by default, whatever spark-submit says where that started the job."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from halfway.pipeline import connector, java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_HIDDEN_OPTIONS: Final = "(?i)url|jaas|password|secret|token|keystore"
# Spark's own, and what it would show: logins and keys.
_HIDDEN_SETTINGS: Final = "(?i)secret|password|token|access[.]?key|jaas|keystore|ssl[._]key|_pem|[.]pem"
GATEWAY: Final = "PYSPARKGATEWAY_PORT"
"""Set by spark-submit for the Python program that it starts."""


@dataclass(frozen=True, kw_only=True)
class SparkOptions:
    """What the command line says about Spark; a None leaves it to Spark's own configuration."""

    master: str | None = None
    memory: str | None = None
    connector_version: str = connector.DEFAULT_VERSION
    jars: Sequence[str] = ()
    """The connector's jars; none: resolved by name."""
    conf: Mapping[str, str] = field(default_factory=dict)


def prepared(name: str, options: SparkOptions, *, kafka: bool = True) -> Callable[[], SparkSession]:
    """Return what starts a session, or takes the one that spark-submit has prepared; nothing is fetched after this.

    Raises:
        JavaError: Spark would not start on the Java that there is.
        ConnectorError: the Kafka connector cannot be had, where `kafka` says that it is needed.

    """
    submitted = GATEWAY in os.environ
    # At DEBUG py4j writes whatever is handed to the JVM, passwords too.
    logging.getLogger("py4j").setLevel(logging.INFO)
    if not submitted:
        java.demand()
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
        # A parked record holds a whole payload: batches are bounded in bytes too.
        "spark.sql.execution.arrow.maxBytesPerBatch": str(64 << 20),
        "spark.sql.sources.partitionOverwriteMode": "static",
        # The default is a type without statistics, by which no reader can leave out a file.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        # Otherwise PySpark tells the JVM, with several calls, from which line of Python each column comes.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        # A stage without rows would be cut out of the plan, and what was counted in it would never be told.
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
            # Much data in few parts would not fit into memory; of little data Spark puts the parts together again.
            "spark.sql.adaptive.coalescePartitions.initialPartitionNum": "200",
        }
        if options.master is not None and not options.master.startswith("local"):
            # On a cluster other machines must reach the driver, and the size of a shuffle is not this machine's.
            for key in (
                "spark.driver.bindAddress",
                "spark.driver.host",
                "spark.sql.shuffle.partitions",
                "spark.sql.adaptive.coalescePartitions.initialPartitionNum",
            ):
                del settings[key]
        if kafka:
            settings["spark.jars"] = ",".join(options.jars or map(str, connector.jars(options.connector_version)))
    return settings | dict(options.conf)
