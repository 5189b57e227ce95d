"""The logs for the benchmark of starts are equal to those that a coordinator writes."""

import asyncio
from dataclasses import dataclass, field
from time import time_ns
from typing import Any

import msgspec

from bench.measures.recovery import Bench, Cell
from bench.report import wide_console, write_json
from bench.runs.recovery import recovery_lines, recovery_table
from bench.system.log_history import History, Plan, Writer, payloads
from halfway.domain.ids import parse_server_id
from halfway.domain.records import Half, Origin
from halfway.kafka.log.cursors import KafkaCursors
from halfway.kafka.records import codec
from halfway.kafka.topics.provisioning import InternalTopics
from halfway.runtime.metrics.metrics import Metrics
from halfway.service.ports import Cursors
from tests.support.brokers.fixtures import Kafka
from tests.support.coordinator.metrics import samples, total
from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, message
from tests.support.coordinator.topics import Cluster, Record
from tests.support.waiting import eventually

PENDING, ENDED = 2, 12
REANCHOR_AFTER = 15
VALUE_BYTES = 40


def plan_of(coordinator: CoordinatorProcess, group: str, topic: str, **fields: Any) -> Plan:
    shards = int(coordinator.settings["HALFWAY_SHARDS"])
    given: dict[str, Any] = {
        "bootstrap_servers": coordinator.settings["HALFWAY_KAFKA__BOOTSTRAP_SERVERS"],
        "prefix": coordinator.prefix,
        "shards": shards,
        "own": tuple(range(shards)),
        "group": group,
        "topic": topic,
        "value_bytes": VALUE_BYTES,
        "pending": PENDING,
        "ended": ENDED,
        "until_ms": time_ns() // 1_000_000,
        "rate_per_s": 100,
        "reanchor_after": REANCHOR_AFTER,
        "wave": 1,
    }
    return Plan(**(given | fields))


async def written(plan: Plan) -> History:
    """Create the topics and write the log."""
    topics = InternalTopics(plan.config)
    await topics.ensure()
    topics.close()
    return await asyncio.to_thread(lambda: Writer(plan).write())


async def cursors_of(plan: Plan, shard: int) -> Cursors | None:
    cursors = KafkaCursors(plan.config, Metrics())
    await cursors.start()
    try:
        return (await asyncio.to_thread(cursors.load, [shard])).get(shard)
    finally:
        await cursors.stop()


@dataclass
class Life:
    """The records of one transaction; values that differ from run to run are replaced by those that they must equal."""

    first: Half
    place: int
    shapes: list[tuple[object, ...]] = field(default_factory=list)
    halves: list[int] = field(default_factory=list)

    def add(self, record: Record, kind: str) -> None:
        """Return the next record: its partition, key, headers and decoded fields, without ids, times and offsets."""
        name = self.first.id
        made = parse_server_id(name)
        assert made is not None
        shown: dict[str, Any] | None = None
        if record.value is not None:
            decoded = codec.decode_half(record.value) if kind == "half" else codec.decode_op(record.value)
            shown = msgspec.structs.asdict(decoded)
            shown["id"] = shown["id"] == name
            shown["prepared_at"] = shown["prepared_at"] == self.first.prepared_at
            if kind == "half":
                shown["since"] = shown["since"] == self.first.prepared_at
                self.halves.append(record.offset)
            else:
                shown["half_offset"] = shown["half_offset"] == self.place
                shown["at"] = self.first.prepared_at <= shown["at"] <= record.timestamp_ms
        self.shapes.append(
            (
                kind,
                record.key == name.encode(),
                record.partition == made[0],
                made[1] <= self.first.prepared_at <= record.timestamp_ms,
                tuple(self._header(*header) for header in record.headers),
                shown,
            )
        )

    def _header(self, name: str, value: bytes | None) -> tuple[str, object]:
        at = b"%d" % self.first.prepared_at
        return (name, value == at) if name == codec.HEADER_PREPARED_AT else (name, value)


async def lives(cluster: Cluster, prefix: str) -> list[Life]:
    """Return the transactions in the order of their prepares, each with its half records and then its op."""
    found: dict[bytes | None, Life] = {}
    for kind in ("half", "op"):
        for record in await cluster.read(f"{prefix}{kind}"):
            if record.key == codec.BARRIER_KEY:
                continue
            if record.key not in found:
                found[record.key] = Life(codec.decode_half(record.value), record.offset)
            found[record.key].add(record, kind)
    return list(found.values())


async def test_a_written_log_is_like_that_of_a_run_record_by_record(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, group: str, topic: str
) -> None:
    """Keys, headers, partitions and decoded fields of halves, op markers, tombstones and re-anchored halves."""
    settings = {"HALFWAY_SHARDS": "1", "HALFWAY_REANCHOR_AFTER": str(REANCHOR_AFTER)}
    run = new_coordinator(settings)
    run.start()
    rest = connect(run)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    made = payloads(topic, VALUE_BYTES)
    for number in range(PENDING + ENDED):
        (content,) = made[number]
        sent = message(topic, (content.value or b"").decode(), key=(content.key or b"").decode(), headers=[])
        prepared = (await rest.prepare(group, [sent])).expect(201)
        if number >= PENDING:
            await rest.commit(prepared["id"])
    plan = plan_of(run, group, topic)
    await eventually(
        lambda: lives(cluster, run.prefix), lambda found: min(len(one.halves) for one in found[:PENDING]) > 1
    )

    async def cursor_and_places() -> tuple[int | None, set[int]]:
        cursors, found = await cursors_of(plan, 0), await lives(cluster, run.prefix)
        return None if cursors is None else cursors.half, {place for one in found[:PENDING] for place in one.halves[1:]}

    # Only the next scan commits the cursor that it has moved.
    await eventually(cursor_and_places, lambda found: found[0] in found[1])
    run.stop()
    real, real_cursors = await lives(cluster, run.prefix), await cursors_of(plan, 0)

    aside = new_coordinator(settings)
    history = await written(plan_of(aside, group, topic))
    copy = await lives(cluster, aside.prefix)

    assert len(real) == len(copy) == PENDING + ENDED
    for one, other in zip(real[PENDING:], copy[PENDING:], strict=True):
        assert one.shapes == other.shapes
        assert [shape[0] for shape in one.shapes] == ["half", "half", "op"]
    for one, other in zip(real[:PENDING], copy[:PENDING], strict=True):
        assert one.shapes[0] == other.shapes[0]
        assert len(other.halves) > 1
        for again in (*one.shapes[1:], *other.shapes[1:]):
            assert again == one.shapes[1]
            assert isinstance(again[5], dict)
            assert again[5]["origin"] is Origin.LANE

    assert real_cursors is not None
    assert real_cursors.half in {place for one in real[:PENDING] for place in one.halves[1:]}
    assert history.half_cursors == {0: min(one.halves[-1] for one in copy[:PENDING])}
    ends = {
        place: end for place, end in cluster.ends([f"{run.prefix}op", f"{aside.prefix}op"]).items() if place[1] == 0
    }
    assert history.op_ends == {0: ends[f"{aside.prefix}op", 0]}
    assert real_cursors.op <= ends[f"{run.prefix}op", 0]


async def test_what_a_start_reads_does_not_stay_long(
    new_coordinator: NewCoordinator, connect: Connect, group: str, topic: str
) -> None:
    """Old pending halves before many ended ones are re-anchored: the next start reads from after these."""
    count, ended = 6, 400
    coordinator = new_coordinator({"HALFWAY_REANCHOR_AFTER": "40", "HALFWAY_OUTCOME_HORIZON_S": "1"})
    hour_ago = time_ns() // 1_000_000 - 3_600_000
    plan = plan_of(
        coordinator, group, topic, pending=count, ended=ended, until_ms=hour_ago, reanchor_after=10**9, wave=50
    )
    history = await written(plan)
    assert history.reanchored == 0
    assert set(history.half_cursors.values()) == {0}

    coordinator.start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], policy={**QUIET, "first_check_after_s": 7200})).expect(201)
    assert total(await samples(rest), "halfway_pending") == count
    shards = range(plan.shards)
    await eventually(
        lambda: asyncio.gather(*(cursors_of(plan, shard) for shard in shards)),
        lambda found: all(at is not None and history.half_ends[0] - 40 <= at.half for at in found),
    )
    coordinator.kill()
    coordinator.start()
    read = [
        line["records"] for line in map(_decoded, coordinator.log.splitlines()) if line["event"] == "shards_acquired"
    ]
    assert sum(read[: plan.shards]) >= count + 2 * ended
    assert sum(read[-plan.shards :]) < ended
    assert total(await samples(rest), "halfway_pending") == count
    for transaction in (await rest.page(state="prepared"))["transactions"]:
        assert (await rest.commit(transaction["id"]))["changed"] is True


def _decoded(line: str) -> dict[str, Any]:
    return msgspec.json.decode(line, type=dict[str, Any]) if line.startswith("{") else {"event": ""}


def test_the_benchmark_tells_of_every_start(kafka: Kafka, tmp_path: Any) -> None:
    """A short run of the same code with a few transactions. The figures are not checked here."""
    cells = [Cell(pending=30), Cell(pending=5, ended=200, lately=True)]
    with Bench(
        say=lambda _: None,
        bootstrap_servers=kafka.bootstrap_servers,
        shards=2,
        watch_s=0.5,
        settings={"HALFWAY_SESSION_TIMEOUT_S": "10"},
        name=f"recovery-{time_ns() % 10**9}-",
    ) as bench:
        found = bench.run(cells)
    assert [one.pending for one in found.starts] == [30, 5]
    assert found.clean, found
    assert found.takeover is not None
    assert found.takeover.pending >= 30
    assert found.all_due is not None
    write_json(tmp_path / "recovery.json", found, print)
    wide_console().print(recovery_table(found), *recovery_lines(found))
