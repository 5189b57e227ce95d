"""The jobs on clusters of processes, through spark-submit: a standalone master with two workers, and YARN."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pyarrow.parquet as pq
import pytest

from tests.support.brokers.fixtures import Kafka
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.rest_client import Rest
from tests.support.coordinator.topics import Cluster
from tests.support.pipeline import commands
from tests.support.pipeline.archives import verdicts_in
from tests.support.pipeline.cluster import COMMON, WORKERS, Application, SparkCluster
from tests.support.pipeline.histories import History, Rogue, write_history
from tests.support.pipeline.yarn import Yarn

SEED = 33
CHOSEN = {
    "spark.app.name": "the audit of the shop",
    "spark.driver.host": "localhost",
    "spark.redaction.regex": "c[a]nary",
    "spark.sql.adaptive.coalescePartitions.initialPartitionNum": "2",
    "spark.sql.adaptive.optimizer.excludedRules": "org.apache.spark.sql.catalyst.optimizer.EliminateLimits",
    "spark.sql.session.timeZone": "Asia/Tokyo",
    "spark.sql.shuffle.partitions": "3",
}
"""Settings of a user, each of which a local job sets itself."""

# Sequentially, with the tests that share a session.
pytestmark = [pytest.mark.timeout(3600), pytest.mark.xdist_group("cluster")]


@pytest.fixture(scope="module")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with SparkCluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What has run on the cluster, over the topics of a coordinator: an application with every command."""

    history: History
    folder: Path
    application: Application
    ended: Mapping[str, tuple[int, float, float]]
    """By command: its exit status, and when it began and ended, in ms."""


@pytest.fixture(scope="module")
def ran(spark_cluster: SparkCluster, kafka: Kafka, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run them after a driver that was killed while it ran `audit --continue`; kill a worker during the whole audit."""
    folder = tmp_path_factory.mktemp("ran")
    coordinator = CoordinatorProcess(kafka.bootstrap_servers, folder / "coordinator")
    coordinator.start()
    try:
        history = asyncio.run(_history(coordinator, cluster))
        coordinator.stop()
    finally:
        coordinator.close()
    rogue = Rogue(kafka.bootstrap_servers, coordinator.prefix, int(coordinator.settings["HALFWAY_SHARDS"]))
    rogue.plant(history, SEED)
    cluster.read_now([*history.topics, *(coordinator.prefix + kind for kind in ("op", "half", "parked"))])
    names = ("HALFWAY_KAFKA__BOOTSTRAP_SERVERS", "HALFWAY_KAFKA_PREFIX")
    settings = {name: coordinator.settings[name] for name in names}
    jobs = commands_into(folder)
    killed = spark_cluster.submit(jobs["continued"], {}, env=settings)
    spark_cluster.await_stage()
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (folder / "continued" / "summary.json").exists()
    # Only the next application is then in progress.
    next(spark_cluster.events.glob("*.inprogress")).unlink()
    (folder / "ended").mkdir()
    given = [json.dumps(jobs), str(folder / "ended")]
    running = spark_cluster.submit(given, CHOSEN, program=Path(commands.__file__), env=settings)
    before = folder / "ended" / "archive.json"
    while running.poll() is None and not before.exists():
        time.sleep(0.2)
    spark_cluster.await_stage(since=json.loads(before.read_text())[2])
    spark_cluster.replace_worker(1)
    assert running.wait(timeout=1200) == 0, spark_cluster.told.read_text()[-10_000:]
    ended = {name: json.loads((folder / "ended" / f"{name}.json").read_text()) for name in jobs}
    [application] = spark_cluster.applications()
    return Ran(history=history, folder=folder, application=application, ended=ended)


def commands_into(folder: Path) -> dict[str, list[str]]:
    """Return all commands, each with a folder of its name for what it writes."""

    def command(name: str, *arguments: str) -> list[str]:
        return [*arguments, "--output", str(folder / name)]

    archive, audit, continued, ledger = (str(folder / name) for name in ("archive", "audit", "continued", "ledger"))
    at_once = ("--grace-s", "0")
    return {
        "archive": command("archive", "archive"),
        "audit": command("audit", "audit", *at_once, "--snapshot", archive),
        "continued": command("continued", "audit", *at_once, "--continue"),
        "cross-check": command("cross-check", "audit", *at_once, "--cross-check", continued),
        "sweep": command("sweep", "sweep"),
        "ledger": command("ledger", "ledger", "--once"),
        "report": command("report", "report", "--trail", "--audit", audit, "--ledger", ledger),
        "export": command("export", "export", "--ledger", ledger),
    }


async def _history(coordinator: CoordinatorProcess, cluster: Cluster) -> History:
    topics = await cluster.make_topics("orders", "payments")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:
        rest = Rest(session, coordinator.url, coordinator.health_url)
        return await write_history(rest, topics, count=200, seed=SEED)


def verdicts(folder: Path) -> dict[str, str]:
    return {row["id"]: row["verdict"] for row in verdicts_in(folder)}


def test_every_command_runs_on_the_workers(ran: Ran) -> None:
    """Each with the engine that `auto` chooses: no task runs on the driver, and no executor has Python."""
    assert {name: status for name, (status, *_) in ran.ended.items()} == {
        **dict.fromkeys(("archive", "sweep", "ledger", "report", "export"), 0),
        **dict.fromkeys(("audit", "continued", "cross-check"), 1),
    }
    found = {name: ran.application.workers(begun, ended) for name, (_, begun, ended) in ran.ended.items()}
    assert all(found.values()), found
    assert not [name for name, tasks in found.items() if "driver" in tasks]
    reading = ("archive", "continued", "cross-check", "sweep", "ledger")
    assert {name: len(found[name]) for name in reading} == dict.fromkeys(reading, WORKERS)
    assert json.loads((ran.folder / "audit" / "summary.json").read_text())["engine"] == "spark"


def test_no_setting_is_another_than_was_given(ran: Ran, spark_cluster: SparkCluster) -> None:
    """The master, and settings that a job on one machine would set itself."""
    given = {"spark.master": spark_cluster.master, "spark.submit.deployMode": "client", **COMMON, **CHOSEN}
    # Spark puts options of its own before those for a JVM.
    assert {name: ran.application.settings[name][-len(value) :] for name, value in given.items()} == given


def test_a_driver_that_was_killed_has_lost_nothing_and_counted_nothing_twice(ran: Ran) -> None:
    """The next run judges each transaction once, as a whole audit of an archive does, and the cross-check agrees."""
    assert verdicts(ran.folder / "continued") == ran.history.expected
    assert json.loads((ran.folder / "cross-check" / "summary.json").read_text())["differences"] == 0


def test_what_the_commands_wrote_on_the_cluster_is_whole(ran: Ran) -> None:
    """Archive and audit as above; the ledger's outcomes in its export, the pending ones of the sweep, the page."""
    ended = [name for name, verdict in ran.history.expected.items() if verdict in ("committed_ok", "rolled_back_ok")]
    exported = pq.read_table(ran.folder / "export" / "ended")
    assert set(ended) <= set(exported.column("id").to_pylist())
    swept = pq.read_table(ran.folder / "sweep" / "unresolved").column("id").to_pylist()
    assert set(ran.history.with_verdict("pending")) <= set(swept)
    assert "lost" in (ran.folder / "report" / "report.html").read_text()


def test_a_worker_that_was_killed_has_cost_no_row(ran: Ran) -> None:
    """Its executor went away with all that it had kept for the next steps; others have computed it again."""
    assert ran.application.lost_executors
    assert verdicts(ran.folder / "audit") == ran.history.expected


def test_a_driver_on_yarn_runs_on_the_cluster_like_its_executors(ran: Ran, tmp_path: Path) -> None:
    """In cluster mode: a container for the driver and one for each executor, which compute; the same rows."""
    with Yarn(tmp_path) as yarn:
        status, told = yarn.submit("sweep", "--snapshot", str(ran.folder / "archive"), "--output", str(tmp_path))
    assert status == 0, told
    swept, again = (pq.read_table(folder / "unresolved") for folder in (ran.folder / "sweep", tmp_path))
    assert sorted(again.column("id").to_pylist()) == sorted(swept.column("id").to_pylist())
    [log] = (tmp_path / "events").iterdir()
    application = Application(log)
    assert application.settings["spark.master"] == "yarn"
    assert application.settings["spark.submit.deployMode"] == "cluster"
    assert application.executors_that_computed == {"1", "2"}
