"""What Spark shows of its settings: no secrets."""

from typing import TYPE_CHECKING, Any

import pytest

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
