"""The Spark session of a job: local by default, else as spark-submit or the user's own files have configured it."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from halfway.pipeline.engines import java, spark_connector
from halfway.pipeline.engines.decoding import LIMITS
from halfway.pipeline.errors import ConnectorError, SessionError

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

_CONNECT: Final = (
    "Spark Connect (Databricks serverless is that too) gives no access to the driver's JVM, which the jobs need: "
    "submit them with spark-submit to a cluster, or run them on one machine"
)
_DEFAULTS: Final = {
    # Spark's own pattern, and logins and keys, which it would show.
    "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|jaas|keystore|ssl[._]key|_pem|[.]pem",
    # Otherwise PySpark makes several calls into the JVM for the line of Python that each column comes from.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.executor.defaultJavaOptions": " ".join(f"-D{name}={value}" for name, value in LIMITS.items()),
}
"""What a job takes if nothing else is configured."""
_EXTENSIONS: Final = "spark.sql.extensions"
_DELTA: Final = {
    _EXTENSIONS: "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
"""What Delta needs in the application. Extensions of the user stay beside it."""
_ON_ONE_MACHINE: Final = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": str(max(4, 2 * (os.cpu_count() or 2))),
    # A few parts of much data would not fit into memory. Spark combines parts of little data again.
    "spark.sql.adaptive.coalescePartitions.initialPartitionNum": "200",
    # Into so many parts Delta divides the state of each table.
    "spark.databricks.delta.snapshotPartitions": "2",
    # VACUUM lists a table in so many tasks, by default 10,000.
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "8",
}
"""The same for a local master."""
_OF_THE_SESSION: Final = {
    # Both engines then quote identifiers in the same way.
    "spark.sql.ansi.doubleQuotedIdentifiers": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.redaction.options.regex": "(?i)url|jaas|password|secret|token|keystore",
    # A parked record has a whole payload, so batches are bounded in bytes too.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(64 << 20),
    "spark.sql.sources.partitionOverwriteMode": "static",
    # Files are combined up to this size: one is written again if one of its rows changes.
    "spark.databricks.delta.optimize.maxFileSize": str(64 << 20),
    # The default is a type without statistics, so readers could not skip files.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
"""What the rows of a job depend on. It is set in a session of the job's own."""
_KEPT_RULES: Final = "spark.sql.adaptive.optimizer.excludedRules"
_EMPTY_STAGES: Final = "org.apache.spark.sql.execution.adaptive.AQEPropagateEmptyRelation"
"""This rule would remove a stage without rows from the plan, together with the counts that it observes."""


@dataclass(frozen=True, kw_only=True)
class SparkOptions:
    """The options of the command line for Spark. None leaves a setting to Spark's own configuration."""

    master: str | None = None
    memory: str | None = None
    connector_version: str | None = None
    jars: Sequence[str] = ()
    """The jars of Spark's packages for Kafka, Avro and Delta. Without any they are resolved by name."""
    conf: Mapping[str, str] = field(default_factory=dict)


def is_submitted() -> bool:
    """Return whether spark-submit has started this program."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def is_one_machine(master: str) -> bool:
    """Return whether a master is this machine alone. `local-cluster[…]` has executors of its own."""
    return re.fullmatch(r"local(\[.*\])?", master) is not None


def prepared(name: str, options: SparkOptions) -> Callable[[], SparkSession]:
    """Return a function that starts a session, or takes the one of spark-submit. It downloads nothing.

    Nothing that is configured is changed, except by the options of the command line.

    Raises:
        JavaError: Spark does not run on the Java of this machine.
        ConnectorError: the packages for Kafka, Avro and Delta are not available.
        SessionError: the session would be one of Spark Connect, or the master is not that of spark-submit.

    """
    submitted = is_submitted()
    # At DEBUG py4j logs everything that goes to the JVM, passwords too.
    logging.getLogger("py4j").setLevel(logging.INFO)
    asked = dict(options.conf)
    if options.master is not None:
        asked.setdefault("spark.master", options.master)
    _refuse_connect(asked)
    if not submitted:
        java.require()
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        # Spark's configuration and the options go before it.
        os.environ.setdefault("SPARK_DRIVER_MEMORY", "2g")
        # spark-submit turns it on for every session that it has not started as a program.
        asked.setdefault("spark.ui.showConsoleProgress", "false")
        if options.memory is not None:
            asked.setdefault("spark.driver.memory", options.memory)
        connector = options.jars or map(str, spark_connector.jars(options.connector_version))
        asked["spark.jars"] = ",".join([*filter(None, [asked.get("spark.jars")]), *connector])

    def start() -> SparkSession:
        from pyspark.sql import SparkSession

        conf = _configuration(name, asked, submitted=submitted)
        spark = session_of_job(SparkSession.builder.config(conf=conf).getOrCreate())
        if not submitted and conf.get("spark.log.level") is None:
            spark.sparkContext.setLogLevel("ERROR")
        try:
            require_packages(spark)
        except ConnectorError:
            spark.stop()
            raise
        return spark

    return start


def session_of_job(spark: SparkSession) -> SparkSession:
    """Return a session for a job beside another one, whose own settings stay as they are.

    Raises:
        SessionError: it is a session of Spark Connect.

    """
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise SessionError(_CONNECT)
    session = spark.newSession()
    for key, value in _OF_THE_SESSION.items():
        session.conf.set(key, value)
    rules = session.conf.get(_KEPT_RULES, None)
    session.conf.set(_KEPT_RULES, f"{rules},{_EMPTY_STAGES}" if rules else _EMPTY_STAGES)
    return session


def require_packages(spark: SparkSession, *, tables: bool = True) -> None:
    """Raise ConnectorError if a package is missing, and bound what decoding allocates in this JVM.

    Only `tables` need the package for Delta.
    """
    from py4j.java_gateway import JavaClass

    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - the documented way into Spark's JVM from Python
    needed = [jvm.org.apache.kafka.clients.admin.Admin, jvm.org.apache.spark.sql.avro.functions]
    for there in [*needed, jvm.io.delta.tables.DeltaTable] if tables else needed:
        if not isinstance(there, JavaClass):
            raise ConnectorError(
                "Spark has no package for Kafka, Avro or Delta: submit with --packages "
                + ",".join(spark_connector.packages())
            )
    for key, value in LIMITS.items():
        jvm.java.lang.System.setProperty(key, value)


def _configuration(name: str, asked: Mapping[str, str], *, submitted: bool) -> SparkConf:
    """Return what Spark's files, spark-submit and the options say, and the defaults of halfway for the rest."""
    from pyspark import SparkConf, SparkContext

    conf = SparkConf()
    for key, value in asked.items():
        conf.set(key, value)
    # Before this there is no JVM that could have read the files.
    SparkContext._ensure_initialized(conf=conf)  # noqa: SLF001 - PySpark calls it itself a moment later
    conf = SparkConf()
    given = conf.get("spark.master")
    if submitted and asked.get("spark.master", given) != given:
        raise SessionError(f"spark-submit's master is {given}, --master is {asked['spark.master']}: leave --master out")
    for key, value in asked.items():
        conf.set(key, value)
    # Without --name it is the name of the program.
    if conf.get("spark.app.name") in (None, "pyspark-shell", Path(sys.argv[0]).name):
        conf.set("spark.app.name", name)
    conf.setIfMissing("spark.master", "local[*]")
    if _DELTA[_EXTENSIONS] not in (extensions := conf.get(_EXTENSIONS) or ""):
        conf.set(_EXTENSIONS, ",".join(filter(None, [extensions, _DELTA[_EXTENSIONS]])))
    on_one_machine = is_one_machine(str(conf.get("spark.master")))
    for key, value in (_DEFAULTS | _DELTA | (_ON_ONE_MACHINE if on_one_machine else {})).items():
        conf.setIfMissing(key, value)
    return conf


def _refuse_connect(asked: Mapping[str, str]) -> None:
    variables = os.environ
    asks = {
        "SPARK_REMOTE": "SPARK_REMOTE" in variables,
        "SPARK_CONNECT_MODE_ENABLED": "SPARK_CONNECT_MODE_ENABLED" in variables,
        "DATABRICKS_RUNTIME_VERSION": variables.get("DATABRICKS_RUNTIME_VERSION", "").startswith("client."),
        "spark.remote": "spark.remote" in asked,
        "the master sc://…": asked.get("spark.master", "").startswith("sc://"),
        "spark.api.mode": asked.get("spark.api.mode", variables.get("SPARK_API_MODE")) == "connect",
    }
    for name in filter(asks.get, asks):
        raise SessionError(f"{name} asks for Spark Connect. {_CONNECT}")
