"""The jobs on a Spark cluster: a standalone master and two workers, processes of their own, and spark-submit."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pipeline.archives import HISTORY, verdicts_in, verdicts_of, write_archive
from tests.support.pipeline.cluster import COMMON, WORKERS, SparkCluster

FOUND = {"committed_ok": 200, "lost": 2, "doubled": 1}
EXPECTED = verdicts_of(**HISTORY)
"""The same result as in a local session, where test_pipeline_cli.py runs the same job."""
CHOSEN = {
    "spark.app.name": "the audit of the shop",
    "spark.driver.host": "localhost",
    "spark.redaction.regex": "c[a]nary",
    "spark.sql.adaptive.coalescePartitions.initialPartitionNum": "7",
    "spark.sql.adaptive.optimizer.excludedRules": "org.apache.spark.sql.catalyst.optimizer.EliminateLimits",
    "spark.sql.session.timeZone": "Asia/Tokyo",
    "spark.sql.shuffle.partitions": "3",
}
"""Settings of a user, each of which a local job sets itself."""

# Sequentially, with the tests that share a session.
pytestmark = [pytest.mark.timeout(3600), pytest.mark.xdist_group("cluster")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with SparkCluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("submitted") / "snapshot"
    write_archive(folder, **HISTORY)
    return folder


def done(job: "subprocess.Popen[str]", status: int = 0) -> str:
    """Return what a job has printed, when it has ended with a status."""
    printed, told = job.communicate(timeout=1200)
    assert job.returncode == status, told[-10_000:]
    return printed


def test_a_submitted_audit_runs_on_the_workers_with_the_users_settings(
    cluster: SparkCluster, snapshot: Path, tmp_path: Path
) -> None:
    """With the engine that `auto` chooses. No task runs on the driver, and no setting is another than was given."""
    job = ["audit", "--snapshot", str(snapshot), "--output", str(tmp_path), "--json"]
    printed = done(cluster.submit(job, CHOSEN), status=1)
    assert {name: count for name, count in json.loads(printed).items() if count} == FOUND
    assert verdicts_in(tmp_path) == EXPECTED
    assert json.loads((tmp_path / "summary.json").read_text())["engine"] == "spark"
    *_, ran = cluster.applications()
    assert len(ran.workers) == WORKERS
    assert "driver" not in ran.workers
    given = {"spark.master": cluster.master, "spark.submit.deployMode": "client", **COMMON, **CHOSEN}
    # Spark puts options of its own before those for a JVM.
    assert {name: ran.settings[name][-len(value) :] for name, value in given.items()} == given
