"""Instances die, join and are upgraded while callers go on."""

import asyncio
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import pytest

from halfway import schemas
from tests.acceptance.fleet import SHARDS, Fleet, RoundRobin, id_in
from tests.acceptance.rest_client import QUIET, Connect, Rest, message
from tests.acceptance.test_several_instances import served_by
from tests.acceptance.topics import Cluster
from tests.acceptance.waiting import eventually, until_true
from tests.fixtures_kafka import Kafka


@pytest.fixture
def fleet(kafka: Kafka, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(kafka.bootstrap_servers, tmp_path)
    try:
        yield fleet
        assert [line for member in fleet.members for line in member.log.splitlines() if '"exception"' in line] == []
    finally:
        fleet.close()


@dataclass
class Load:
    """Callers behind a load balancer, who try again where they are told to; what they saw is kept."""

    rest: Rest
    group: str
    topic: str
    answers: Counter[tuple[int, str | None]] = field(default_factory=Counter)
    prepared: set[str] = field(default_factory=set)
    committed: set[str] = field(default_factory=set)
    without_retry_after: list[object] = field(default_factory=list)
    done: bool = False

    async def call(self, what: str, body: dict[str, object]) -> tuple[int, dict[str, Any]]:
        """Make a call until it is answered by anything but 503; 0 stands for a connection that was lost."""
        while True:
            try:
                answer = await self.rest.call("POST", what, body)
            except (aiohttp.ClientError, TimeoutError):
                self.answers[0, None] += 1
            else:
                self.answers[answer.status, answer.error_code] += 1
                if answer.status not in (429, 503):
                    return answer.status, answer.body
                if "Retry-After" not in answer.headers:
                    self.without_retry_after.append(answer)
            await asyncio.sleep(0.1)

    async def caller(self) -> None:
        while not self.done:
            name = f"load-{uuid4().hex}"
            status, _ = await self.call(
                "/transactions", {"group": self.group, "id": name, "messages": [message(self.topic, name)]}
            )
            assert status in (200, 201), (status, name)
            self.prepared.add(name)
            status, body = await self.call(f"/transactions/{name}/end", {"outcome": "commit"})
            assert (status, body["state"]) == (200, "committed")
            self.committed.add(name)


async def shares(rests: list[Rest]) -> list[set[int]]:
    """Give the shards of each instance; none for one that cannot be asked."""
    found = []
    for rest in rests:
        try:
            found.append(await served_by(rest))
        except aiohttp.ClientError:
            found.append(set())
    return found


async def test_an_instance_is_killed_and_another_joins_under_load(
    fleet: Fleet, connect: Connect, cluster: Cluster, topic: str, group: str
) -> None:
    """The others take over, and only what must move moves; callers see nothing but lost connections and 503."""
    fleet.start(3)
    rests = [connect(member) for member in fleet.members]
    await eventually(lambda: shares(rests), lambda found: [len(one) for one in found] == [2, 2, 2])
    await rests[0].put_group(group, topics=[topic], policy=QUIET)
    load = Load(RoundRobin(rests[0].session, fleet.members), group, topic)
    async with asyncio.TaskGroup() as callers:
        for _ in range(6):
            callers.create_task(load.caller())
        await until_true(lambda: len(load.committed) > 60, what="commits")

        before = await shares(rests)
        fleet.members[2].kill()
        killed_at = time.monotonic()
        two = rests[:2]
        after = await eventually(lambda: shares(two), lambda found: set().union(*found) == set(range(SHARDS)))
        print(f"taken over after {time.monotonic() - killed_at:.1f} s; callers saw {dict(load.answers)}")  # noqa: T201 - a figure to read
        assert after[0] >= before[0], "a shard of an instance that lives was moved"
        assert after[1] >= before[1], "a shard of an instance that lives was moved"
        load.rest = RoundRobin(rests[0].session, fleet.members[:2])
        count = len(load.committed)
        await until_true(lambda: len(load.committed) > count + 60, what="commits after the takeover")

        before = after
        fresh = fleet.add()
        fresh.launch()
        three = [*two, connect(fresh)]
        after = await eventually(lambda: shares(three), lambda found: [len(one) for one in found] == [2, 2, 2])
        assert after[0] < before[0], "it got a shard that it did not have"
        assert after[1] < before[1], "it got a shard that it did not have"
        load.rest = RoundRobin(rests[0].session, [*fleet.members[:2], fresh])
        count = len(load.committed)
        await until_true(lambda: len(load.committed) > count + 60, what="commits after the third joined")
        load.done = True
    assert set(load.answers) <= {
        (0, None),
        (201, None),
        (200, None),
        *((503, code) for code in ("shard_unavailable", "outcome_unknown", "end_unconfirmed", "kafka_unavailable")),
    }, load.answers
    assert load.without_retry_after == []
    values = [(record.value or b"").decode() for record in await cluster.read(topic)]
    assert sorted(values) == sorted(load.committed)
    assert load.committed == load.prepared
    for rest in three:
        _, metrics = await rest.health("/metrics")
        [moved] = [line for line in metrics.splitlines() if line.startswith("halfway_shard_away_seconds_count")]
        assert float(moved.split()[1]) >= 2


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


# --- a rolling upgrade

NEWER = '''
"""Makes this process one of the next release: a further field in half, and further fields between instances."""
import msgspec
from halfway.kafka import codec
from halfway.service import peer_wire

_half, _call, _answer = codec.encode_half, peer_wire.encode_call, peer_wire.encode_answer


def encode_call(call, **fields):
    frame = msgspec.msgpack.decode(_call(call, **fields))
    frame["newer"] = frame["call"]["newer"] = {"field": [1]}
    return msgspec.msgpack.encode(frame)


def encode_answer(index, result):
    frame = msgspec.msgpack.decode(_answer(index, result)[4:])
    frame["newer"] = (frame.get("result") or frame["error"])["newer"] = "field"
    body = msgspec.msgpack.encode(frame)
    return len(body).to_bytes(4, "big") + body


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
    """Make two copies of the schemas, which a process finds before the installed ones."""
    from halfway.kafka.avro import Registry

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
    """Either asks the other, reads what it wrote and takes over its shards; one that skipped a release stays out."""
    older, newer = fleet.add(releases.now), fleet.add(releases.next)
    for member in (older, newer):
        member.launch()
    for member in (older, newer):
        member.wait_until_ready()
    old, new = connect(older), connect(newer)
    await eventually(lambda: shares([old, new]), lambda found: [len(one) for one in found] == [3, 3])
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
        assert (await new.end(name, "commit", retry=True)).expect(200)["changed"]
    for shard in range(SHARDS):
        (await new.prepare(group, [message(topic, "later")], as_id=id_in(shard))).expect(201)

    skipped = fleet.add()  # it knows nothing of the newer schema
    skipped.launch()
    await until_true(lambda: "release_too_old" in skipped.log, what="a release that is too old")
    await eventually(lambda: shares([new]), lambda found: found == [set(range(SHARDS))])
    status, told = await connect(skipped).health("/health/ready")
    assert status == 503
    assert "newer release" in told
    for name in names[30:]:
        assert (await new.end(name, "commit", retry=True)).expect(200)["changed"]
    values = [(record.value or b"").decode() for record in await cluster.read(topic)]
    assert sorted(values) == sorted(names)
