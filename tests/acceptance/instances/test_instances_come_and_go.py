"""Instances die, join and are upgraded while callers continue."""

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from halfway import schemas
from halfway.protocol.records import OpKind, rfc3339
from tests.support.brokers.fixtures import Kafka
from tests.support.coordinator.callers import Callers
from tests.support.coordinator.fleet import SHARDS, Fleet, RoundRobin, id_in, settled, shares
from tests.support.coordinator.process import READY_WITHIN_S
from tests.support.coordinator.rest_client import QUIET, Connect, message
from tests.support.coordinator.topics import Cluster, InternalTopics
from tests.support.waiting import GENEROUS_S, eventually, until_true


@pytest.fixture
def fleet(kafka: Kafka, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(kafka.bootstrap_servers, tmp_path)
    try:
        yield fleet
        assert [line for member in fleet.members for line in member.log.splitlines() if '"exception"' in line] == []
    finally:
        fleet.close()


async def test_without_the_credential_nothing_is_forwarded_and_the_log_says_so(
    kafka: Kafka, tmp_path: Path, connect: Connect, topic: str, group: str
) -> None:
    fleet = Fleet(kafka.bootstrap_servers, tmp_path)
    fleet.settings.pop("HALFWAY_PEER_CREDENTIAL")
    try:
        fleet.start(2)
        rests = [connect(member) for member in fleet.members]
        found = await eventually(lambda: shares(rests), lambda found: [len(one) for one in found] == [3, 3])
        await rests[0].put_group(group, topics=[topic], policy=QUIET)
        name = id_in(min(found[1]))
        answer = await rests[0].prepare(group, [message(topic)], as_id=name)
        answer.refused(503, "shard_unavailable")
        assert answer.headers["Retry-After"]
        (await rests[0].call("GET", "/transactions")).refused(503, "shard_unavailable")
        async with rests[0].session.post(f"{fleet.members[0].url}/peer", data=b"") as response:
            assert response.status == 404
        await until_true(
            lambda: all("other_instances_are_not_asked" in member.log for member in fleet.members),
            what="a warning in each log",
        )
    finally:
        fleet.close()


async def test_every_end_is_counted_once_whoever_dies(
    fleet: Fleet, connect: Connect, cluster: Cluster, topic: str, group: str
) -> None:
    """By kill -9 under load, again and again: shards move to and fro, and all that ever ended is counted in Kafka."""
    fleet.settings["HALFWAY_OUTCOME_HORIZON_S"] = "3"  # so the counts of a while ago are stored, not of acquisitions
    fleet.start(2)
    rest, dying = connect(fleet.members[0]), fleet.members[1]
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    async with Callers(rest, group, [topic], callers=12) as callers:
        for _ in range(2):
            await callers.committed(100)
            dying.kill()
            await eventually(lambda: shares([rest]), lambda found: found == [set(range(SHARDS))])
            await callers.committed(100)
            dying.launch()
            await asyncio.to_thread(dying.wait_until_ready)
            await settled([rest, connect(dying)])
        await callers.finish()
    ops = [op for op in await InternalTopics(cluster, fleet.prefix).ops() if op.kind.final]
    ended = {kind: dict(Counter(op.cause.value for op in ops if op.kind is kind)) for kind in {op.kind for op in ops}}
    shown = (await rest.call("GET", "/statistics")).expect(200)
    assert shown["complete"]
    assert shown["totals"]["committed"] == ended[OpKind.COMMITTED]
    assert shown["totals"]["rolled_back"] == ended[OpKind.ROLLED_BACK]
    assert shown["totals"]["counted_since"] == rfc3339(min(op.at for op in ops))


# --- a rolling upgrade

NEWER = '''
"""Makes this process one of the next release: a further field in half, and further fields between instances."""
import msgspec
from halfway.kafka.records import codec
from halfway.coordinator import records as peer_wire

_half, _call, _answer = codec.encode_half, peer_wire.encode_call, peer_wire.encode_answer


def encode_call(number, call, **fields):
    frame = msgspec.msgpack.decode(_call(number, call, **fields))
    frame["newer"] = frame["call"]["newer"] = {"field": [1]}
    return msgspec.msgpack.encode(frame)


def encode_answer(number, result):
    frame = msgspec.msgpack.decode(_answer(number, result))
    frame["newer"] = (frame.get("result") or frame["error"])["newer"] = "field"
    return msgspec.msgpack.encode(frame)


codec.encode_half = lambda half: _half(half) + b"\\2\\x0atrace"
peer_wire.encode_call, peer_wire.encode_answer = encode_call, encode_answer
'''


@dataclass
class Releases:
    """Settings that make an instance one of this release, of the next one, and of the one before both."""

    now: dict[str, str]
    next: dict[str, str]
    fingerprints: dict[str, bytes]


@pytest.fixture
def releases(tmp_path: Path) -> Releases:
    """Make two copies of the schemas, which a process loads instead of the installed ones."""
    from halfway.kafka.records.codec import Registry

    ours = Path(schemas.__file__).parent
    places = {name: tmp_path / name / "halfway" / "schemas" for name in ("now", "next")}
    for place in places.values():
        shutil.copytree(ours, place, ignore=shutil.ignore_patterns("__pycache__"))
    half = schemas.current("half")
    newer = json.loads(json.dumps(half))
    newer["fields"].append({"name": "trace", "type": ["null", "string"], "default": None})
    (places["now"] / "upcoming" / "half.v1000.avsc").write_text(json.dumps(newer), encoding="utf-8")
    (places["next"] / "half.avsc").write_text(json.dumps(newer), encoding="utf-8")
    (places["next"] / "history").mkdir(exist_ok=True)
    (places["next"] / "history" / "half.v999.avsc").write_text(json.dumps(half), encoding="utf-8")
    (tmp_path / "next" / "sitecustomize.py").write_text(NEWER, encoding="utf-8")
    return Releases(
        now={"PYTHONPATH": str(tmp_path / "now")},
        next={"PYTHONPATH": str(tmp_path / "next")},
        fingerprints={"now": Registry("half", (half,)).header, "next": Registry("half", (newer,)).header},
    )


async def test_two_releases_run_side_by_side_in_a_rolling_upgrade(
    fleet: Fleet, releases: Releases, connect: Connect, cluster: Cluster, topic: str, group: str
) -> None:
    """Each calls the other, reads its records and takes over its shards; one that skipped a release stays out."""
    older, newer = fleet.add(releases.now), fleet.add(releases.next)
    for member in (older, newer):
        member.launch()
    for member in (older, newer):
        member.wait_until_ready()
    old, new = connect(older), connect(newer)
    await settled([old, new])
    both = RoundRobin(old.session, [older, newer])
    await both.put_group(group, topics=[topic], policy=QUIET)
    names = [id_in(number % SHARDS) for number in range(36)]
    prepared = [(await both.prepare(group, [message(topic, name)], as_id=name)).expect(201)["id"] for name in names]
    assert prepared == names
    assert (
        len((await old.page(group=group))["transactions"]) == len((await new.page(group=group))["transactions"]) == 36
    )
    for name in names[:12]:
        assert (await both.end(name, "commit")).expect(200)["changed"]
        (await both.end(name, "rollback")).refused(409, "already_ended")
    written = Counter(
        (record.value or b"")[:10] for record in await cluster.read(f"{fleet.prefix}half") if record.value is not None
    )
    assert written[releases.fingerprints["now"]] > 0
    assert written[releases.fingerprints["next"]] > 0

    assert newer.stop() == 0
    await eventually(lambda: shares([old]), lambda found: found == [set(range(SHARDS))])
    for name in names[12:24]:
        assert (await old.show(name))["messages"][0]["value"] == name
        assert (await old.end(name, "commit")).expect(200)["changed"]

    newest = fleet.add(releases.next)
    newest.start()
    assert older.stop() == 0
    new = connect(newest)
    await eventually(lambda: shares([new]), lambda found: found == [set(range(SHARDS))])
    for name in names[24:30]:
        assert (await new.commit(name, retry=True))["changed"]
    for shard in range(SHARDS):
        (await new.prepare(group, [message(topic, "later")], as_id=id_in(shard))).expect(201)

    skipped = fleet.add()  # it does not know the newer schema
    skipped.launch()
    within_s = READY_WITHIN_S + GENEROUS_S  # its start is included
    await until_true(lambda: "release_too_old" in skipped.log, what="a release that is too old", within_s=within_s)
    await eventually(lambda: shares([new]), lambda found: found == [set(range(SHARDS))])
    status, _ = await eventually(
        lambda: connect(skipped).health("/health/ready"), lambda answer: "newer release" in answer[1]
    )
    assert status == 503
    for name in names[30:]:
        assert (await new.commit(name, retry=True))["changed"]
    values = [(record.value or b"").decode() for record in await cluster.read(topic)]
    assert sorted(values) == sorted(names)
