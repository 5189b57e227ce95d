"""The audit of the topics of a real coordinator, with anomalies that a rogue producer planted."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from checker.dump import read_topics
from checker.history import AnyEvent
from checker.judge import judge
from checker.records import AnyRecord
from halfway.pipeline import tables as runs
from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.engines.engine import SparkEngine
from halfway.pipeline.jobs import audit, sweep
from halfway.pipeline.jobs.audit import AuditOptions
from halfway.pipeline.sources.pinned import KafkaSource
from halfway.pipeline.sources.spark import SparkReader
from halfway.pipeline.tables import Folder
from halfway.protocol.records import Message
from tests.support.brokers.fixtures import Kafka
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.rest_client import Rest
from tests.support.coordinator.topics import Cluster
from tests.support.pipeline.archives import verdicts_in
from tests.support.pipeline.fixtures import Command
from tests.support.pipeline.histories import ANSWERED_WITHIN_S, History, Rogue, as_messages, events, write_history
from tests.unit.pipeline.transforms.test_agreement import shown

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEED = 20
COUNT = 2_000
NO_GRACE = AuditOptions(grace_ms=0)
BEHIND = "behind-what-hangs"
"""Its message cannot be read yet: it comes after an open Kafka transaction."""
UNREADABLE = ["groups", "half", "op", "op", "parked"]
LATECOMER = "written-after-the-audit"


@dataclass(frozen=True, kw_only=True)
class World:
    """A broker with a history, and the coordinator stopped."""

    history: History
    planted: dict[str, str]
    rogue: Rogue
    access: KafkaAccess
    asked: list[AnyEvent]
    """The requests and answers of callers, for the checker."""
    written: list[AnyRecord]
    """The topics as the checker reads them, without unreadable records."""

    @property
    def settings(self) -> dict[str, str]:
        """The coordinator's settings, as environment variables."""
        servers = self.access.bootstrap_servers
        return {"HALFWAY_KAFKA__BOOTSTRAP_SERVERS": servers, "HALFWAY_KAFKA_PREFIX": self.access.prefix}


@pytest.fixture(scope="module")
def world(
    spark: "SparkSession", kafka: Kafka, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """Make it when Spark runs: the broker limits the duration of the open Kafka transaction."""
    coordinator = CoordinatorProcess(kafka.bootstrap_servers, tmp_path_factory.mktemp("audited"))
    coordinator.start()
    try:
        history = asyncio.run(_history(coordinator, cluster))
        coordinator.stop()
    finally:
        coordinator.close()
    rogue = Rogue(kafka.bootstrap_servers, coordinator.prefix, int(coordinator.settings["HALFWAY_SHARDS"]))
    rogue.abort(history)
    ended = dict(history.expected)
    planted = rogue.plant(history, SEED)
    asked = events(history, dict.fromkeys(planted, "committed_ok") | ended)
    written = list(read_topics(kafka.bootstrap_servers, prefix=coordinator.prefix, topics=history.topics))
    rogue.plant_garbage(history)
    # The markers of the last Kafka transactions come a moment later: until then their records are undecided.
    cluster.read_now([*history.topics, *(coordinator.prefix + kind for kind in ("op", "half", "parked"))])
    access = KafkaAccess(librdkafka={"bootstrap.servers": kafka.bootstrap_servers}, prefix=coordinator.prefix)
    # A committed second copy of a message would be a duplicate; this one is never committed.
    hanging = rogue.leave_open(history, history.with_verdict("committed_ok")[0])
    try:
        rogue.commit(BEHIND, _any_message(history))
        history.expected[BEHIND] = "pending"
        yield World(history=history, planted=planted, rogue=rogue, access=access, asked=asked, written=written)
    finally:
        hanging.abort_transaction(ANSWERED_WITHIN_S)


async def _history(coordinator: CoordinatorProcess, cluster: Cluster) -> History:
    topics = await cluster.make_topics("orders", "payments", "mails")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:
        rest = Rest(session, coordinator.url, coordinator.health_url)
        return await write_history(rest, topics, count=COUNT, seed=SEED)


def rows(folder: Path, table: str) -> list[dict[str, Any]]:
    """Return the rows of a table, as any reader of Delta finds them."""
    found: list[dict[str, Any]] = DeltaTable(folder / table).to_pyarrow_table().to_pylist()
    return found


@pytest.fixture(scope="module")
def audited(spark: "SparkSession", world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit")
    audit.run(SparkEngine(spark), KafkaSource(SparkReader(spark), world.access), Folder(spark, str(folder)), NO_GRACE)
    return folder


def test_every_transaction_has_the_verdict_that_it_must_have(world: World, audited: Path) -> None:
    """Thousands with all outcomes, over several topics, parked and resumed: each id once, with its verdict.

    A commit after an open Kafka transaction cannot be read yet: it is pending, not lost.
    """
    found = [(row["id"], row["verdict"]) for row in rows(audited, runs.VERDICTS)]
    assert len(found) == len(dict(found))
    wrong = {name: verdict for name, verdict in found if world.history.expected.get(name) != verdict}
    assert wrong == {}, f"seed {SEED}"
    assert dict(found).keys() == world.history.expected.keys()


def test_exactly_the_planted_anomalies_are_found(world: World, audited: Path) -> None:
    """The records of a rogue producer are found by id, kind and place; open Kafka transactions are no anomaly."""
    anomalies = {row["id"]: row for row in rows(audited, runs.ANOMALIES)}
    assert {name: row["verdict"] for name, row in anomalies.items()} == world.planted
    for row in anomalies.values():
        assert row["evidence"] or row["verdict"] == "contradicted"


def test_the_checker_of_the_chaos_runs_finds_the_same_in_the_same_topics(world: World, audited: Path) -> None:
    """The checker, with its own reader and rules, and the audit find the same ids, with matching anomalies."""
    anomalies = {row["id"]: set(row["anomalies"]) for row in rows(audited, runs.ANOMALIES)}
    # What was planted has no half, which the checker does not ask for.
    assert {"unprepared"} <= set().union(*anomalies.values())
    found = {name: kinds - {"unprepared"} for name, kinds in anomalies.items()}
    assert shown(judge(world.asked, world.written).findings, world.written) == found


def test_what_cannot_be_read_is_put_into_quarantine(audited: Path) -> None:
    """Unreadable records stop no audit; each is reported with topic, partition, offset and error."""
    found = rows(audited, runs.QUARANTINE)
    errors = sorted((row["topic"].rpartition(".")[2], row["error"]) for row in found)
    assert [topic for topic, _ in errors] == UNREADABLE
    assert all(row["offset"] >= 0 and row["partition"] == 0 for row in found)
    assert any("unknown schema fingerprint" in error for _, error in errors)


def test_the_same_offsets_give_the_same_rows(command: Command, world: World, audited: Path, tmp_path: Path) -> None:
    """An audit over the offsets of an earlier one reads the same, even if records were written since."""
    world.rogue.commit(LATECOMER, _any_message(world.history))
    offsets = ("--offsets", str(audited / audit.OFFSETS))
    again = command("audit", *offsets, "--grace-s", "0", "--output", str(tmp_path), **world.settings)
    assert again.exit_code == 1, again.output
    assert verdicts_in(tmp_path) == verdicts_in(audited)


def test_an_archive_gives_the_same_verdicts(command: Command, world: World, audited: Path, tmp_path: Path) -> None:
    """An archive in Parquet can be audited without Kafka."""
    kept = str(tmp_path / "archive")
    archived = command("archive", "--output", kept, **world.settings)
    assert archived.exit_code == 0, archived.output
    assert {line.partition(":")[0] for line in archived.stdout.splitlines()} >= {*world.history.topics}
    again = command("audit", "--snapshot", kept, "--grace-s", "0", "--output", str(tmp_path / "audit"))
    assert again.exit_code == 1, again.output
    assert [row for row in verdicts_in(tmp_path / "audit") if row["id"] != LATECOMER] == verdicts_in(audited)


def test_an_audit_that_goes_on_agrees_with_the_whole(
    command: Command, world: World, audited: Path, tmp_path: Path
) -> None:
    """The first run reads everything, the second only open transactions: same verdicts, each anomaly once."""
    job = ("audit", "--continue", "--grace-s", "0", "--output", str(tmp_path))
    for _ in range(2):
        ended = command(*job, **world.settings)
        assert ended.exit_code == 1, ended.output
    last = {row["id"]: row["verdict"] for row in rows(tmp_path, runs.VERDICTS) if row["id"] != LATECOMER}
    assert last == {row["id"]: row["verdict"] for row in verdicts_in(audited)}
    anomalies = rows(tmp_path, runs.ANOMALIES)
    assert sorted(row["id"] for row in anomalies) == sorted(world.planted)
    assert {row["run"] for row in anomalies} == {0}
    compared = ("audit", "--cross-check", str(tmp_path), "--grace-s", "0", "--output", f"{tmp_path}-whole")
    ended = command(*compared, **world.settings)
    assert ended.exit_code == 1, ended.output
    assert "\n0 differences from the audit with --continue" in ended.stdout


def test_sweep_finds_what_is_pending_without_decoding(spark: "SparkSession", world: World, tmp_path: Path) -> None:
    """Half minus op by keys and headers: exactly the pending ones, counted by group and age."""
    counts = sweep.run(
        spark, KafkaSource(SparkReader(spark), world.access), Folder(spark, str(tmp_path)), sweep.SweepOptions()
    )
    found = set(pq.read_table(tmp_path / sweep.UNRESOLVED)["id"].to_pylist())
    leaked = {name for name, verdict in world.planted.items() if verdict == "leaked"}
    # One has an unreadable outcome, the other only an outcome.
    pending = set(world.history.with_verdict("pending")) - {"damaged", BEHIND}
    assert pending <= found <= pending | leaked
    assert sum(row["pending"] for row in counts) == len(found)
    assert {row["group"] for row in counts} == {"shop", "parking"}
    assert sum(row["due"] for row in counts) == 0, "the group's own first check is in an hour"
    wrong = sorted(
        topic.rpartition(".")[2] for topic in pq.read_table(tmp_path / sweep.QUARANTINE)["topic"].to_pylist()
    )
    assert wrong == ["groups", "half", "op"], "what is not decoded is not damaged"


def test_the_summary_counts_every_verdict(world: World, audited: Path) -> None:
    """The printed counts add up to the written ones."""
    summary = json.loads((audited / audit.SUMMARY).read_text())
    assert sum(summary[name] for name in set(world.history.expected.values())) == len(world.history.expected)
    assert summary["quarantined"] == len(UNREADABLE)


def _any_message(history: History) -> Message:
    """Return the first message of the first committed transaction."""
    return as_messages(history.messages[history.with_verdict("committed_ok")[0]])[0]
