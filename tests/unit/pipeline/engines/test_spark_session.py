"""The session of a job: what is one machine, what is refused, and what Spark shows of its settings."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

from halfway.pipeline.engines.spark_session import is_one_machine, prepared, session_of_job
from halfway.pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HIDDEN = (
    "spark.yarn.appMasterEnv.HALFWAY_KAFKA__SASL_PASSWORD",
    "spark.yarn.appMasterEnv.HALFWAY_KAFKA__SSL_KEY_PEM",
    "spark.kubernetes.driverEnv.HALFWAY_PIPELINE_KAFKA__SASL_JAAS_CONFIG",
    "spark.kubernetes.driverEnv.HALFWAY_PIPELINE_KAFKA__SSL_KEYSTORE_KEY",
    "spark.hadoop.fs.s3a.access.key",
    "spark.hadoop.fs.s3a.secret.key",
)
SHOWN = ("spark.yarn.appMasterEnv.HALFWAY_KAFKA__BOOTSTRAP_SERVERS", "spark.sql.shuffle.partitions")


@pytest.mark.parametrize("name", [*HIDDEN, *SHOWN])
def test_spark_shows_no_setting_that_holds_a_secret(spark: "SparkSession", name: str) -> None:
    """In its page, its event log and its logs Spark puts a mark in the place of passwords, logins and keys."""
    jvm: Any = spark.sparkContext._jvm
    of_session: Any = spark.sparkContext._jsc
    settings = jvm.java.util.ArrayList()
    settings.add(jvm.scala.Tuple2(name, "value-of-it"))
    shown = jvm.org.apache.spark.util.Utils.redact(
        of_session.sc().conf(), jvm.scala.jdk.javaapi.CollectionConverters.asScala(settings).toSeq()
    )
    assert ("value-of-it" in shown.mkString()) is (name in SHOWN)


@pytest.mark.parametrize(
    "master, found",
    [
        ("local", True),
        ("local[*]", True),
        ("local[2,3]", True),
        ("local-cluster[2,1,1024]", False),
        ("localhost:7077", False),
        ("spark://local:7077", False),
        ("yarn", False),
    ],
)
def test_only_local_and_local_with_threads_are_one_machine(master: str, found: bool) -> None:
    """All others have executors in processes of their own, elsewhere perhaps."""
    assert is_one_machine(master) is found


@pytest.mark.parametrize(
    "variables, conf",
    [
        ({"SPARK_REMOTE": "sc://there"}, {}),
        ({"SPARK_CONNECT_MODE_ENABLED": "1"}, {}),
        ({"SPARK_API_MODE": "connect"}, {}),
        ({"DATABRICKS_RUNTIME_VERSION": "client.3.2"}, {}),
        ({}, {"spark.master": "sc://there:15002"}),
        ({}, {"spark.remote": "sc://there"}),
        ({}, {"spark.api.mode": "connect"}),
    ],
)
def test_spark_connect_is_refused_by_name_before_anything_starts(
    variables: Mapping[str, str], conf: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what asks for it, and what to do."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    [named] = [*variables, *(value if name == "spark.master" else name for name, value in conf.items())]
    with pytest.raises(PipelineError, match=r"asks for Spark Connect.*spark-submit") as refused:
        prepared("job", conf)
    assert named.replace("SPARK_API_MODE", "spark.api.mode").partition("there")[0] in str(refused.value)


def test_a_session_of_spark_connect_is_refused_by_name() -> None:
    """Instead of an error about a JVM that it has not."""
    remote = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})
    with pytest.raises(PipelineError, match="Spark Connect"):
        session_of_job(remote())


def test_a_job_changes_no_setting_of_the_callers_session(spark: "SparkSession") -> None:
    """It has a session of its own, with what its rows depend on."""
    caller = spark.newSession()
    caller.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    caller.conf.set("spark.sql.ansi.doubleQuotedIdentifiers", "false")
    before = caller.conf.getAll
    job = session_of_job(caller)
    assert caller.conf.getAll == before
    assert job.sql('select 1 as "one"').columns == ["one"]
    assert job.conf.get("spark.sql.session.timeZone") == "UTC"
