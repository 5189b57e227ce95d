"""Three instances behind a load balancer: the owner answers, through any instance."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from tests.support.brokers.fixtures import Kafka
from tests.support.coordinator.callers import Callers
from tests.support.coordinator.fleet import SHARDS, Fleet, RoundRobin, id_in, served_by, settled, shares
from tests.support.coordinator.rest_client import QUIET, Connect, Rest, message
from tests.support.coordinator.stream_client import CheckedStream
from tests.support.coordinator.topics import Cluster
from tests.support.waiting import GENEROUS_S, eventually

# They share three processes.
pytestmark = pytest.mark.xdist_group("fleet")


@pytest.fixture(scope="module")
def fleet(kafka: Kafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start three instances that serve two shards each; only the last test of this module kills one."""
    fleet = Fleet(kafka.bootstrap_servers, tmp_path_factory.mktemp("fleet"))
    try:
        fleet.start(3)
        yield fleet
        assert [line for member in fleet.members for line in member.log.splitlines() if '"exception"' in line] == []
    finally:
        fleet.close()


@pytest.fixture
async def rests(fleet: Fleet, connect: Connect) -> list[Rest]:
    """Return a client of each instance, when each serves its share."""
    rests = [connect(member) for member in fleet.members]
    await settled(rests)
    return rests


async def forwarded_by(rest: Rest, call: str) -> float:
    _, metrics = await rest.health("/metrics")
    wanted = f'halfway_forwarded_total{{call="{call}",result="done"}} '
    return sum(float(line.removeprefix(wanted)) for line in metrics.splitlines() if line.startswith(wanted))


async def test_every_call_may_go_to_any_instance(rests: list[Rest], cluster: Cluster, topic: str, group: str) -> None:
    """Prepare, get, check, resume and end in each shard through each instance; each message is stored exactly once."""
    await rests[0].put_group(group, topics=[topic], urls=["http://127.0.0.1:9/"], policy=QUIET)
    sent = []
    for rest in rests:
        for shard in range(SHARDS):
            name = id_in(shard)
            made = (await rest.prepare(group, [message(topic, name)], as_id=name)).expect(201)
            assert (made["id"], made["state"]) == (name, "prepared")
            assert (await rest.prepare(group, [message(topic, name)], as_id=name)).status == 200
            (await rest.prepare(group, [message(topic, "other")], as_id=name)).refused(409, "id_reused")
            assert (await rest.show(name))["messages"][0]["value"] == name
            (await rest.check(name)).expect(202)
            (await rest.resume(name)).expect(200)
            assert await rest.commit(name) == {"id": name, "state": "committed", "changed": True}
            assert (await rest.commit(name))["changed"] is False
            problem = (await rest.end(name, "rollback")).refused(409, "already_ended")
            assert problem["state"] == "committed"
            sent.append(name)
    values = [(record.value or b"").decode() for record in await cluster.read(topic)]
    assert sorted(values) == sorted(sent)
    for rest in rests:
        for call in ("prepare", "end", "get", "check", "resume"):
            assert await forwarded_by(rest, call) > 0, call


async def test_figures_batches_and_histories_are_those_of_all_instances(
    rests: list[Rest], cluster: Cluster, topic: str, group: str
) -> None:
    """Each through another instance: nothing of the other shards is missing."""
    await rests[0].put_group(group, topics=[topic], urls=["http://127.0.0.1:9/"], policy=QUIET)
    names = [id_in(shard) for shard in range(SHARDS)]
    for name in names:
        (await rests[0].prepare(group, [message(topic, name)], as_id=name)).expect(201)

    async def figures() -> list[tuple[bool, list[int], list[int], int, bool]]:
        shown = [(await rest.call("GET", "/statistics")).expect(200) for rest in rests]
        return [
            (
                one["complete"],
                [shard["shard"] for shard in one["shards"]],
                [row["pending"] for row in one["groups"] if row["group"] == group],
                len(one["instances"]),
                one["counted"]["prepares"] >= SHARDS,
            )
            for one in shown
        ]

    await eventually(figures, lambda found: found == [(True, [*range(SHARDS)], [SHARDS], 3, True)] * 3)
    ends = {"end": [{"id": name, "outcome": "commit", "remark": "all of them"} for name in names]}
    for rest in rests:
        answers = (await rest.call("POST", "/batch", ends)).expect(200)["end"]
        assert {(one["status"], one["body"]["state"]) for one in answers} == {(200, "committed")}
    found = {(record.partition, record.offset, record.transaction_id) for record in await cluster.read(topic)}
    assert {name for _, _, name in found} == set(names)
    assert len(found) == SHARDS
    for rest in rests:
        for name in names:

            async def history(rest: Rest = rest, name: str = name) -> list[tuple[int, int, str]]:
                shown = (await rest.call("GET", f"/transactions/{name}/history")).expect(200)
                assert [event["event"] for event in shown["events"]] == ["prepared", "committed"]
                assert shown["events"][1]["remark"] == "all of them"
                return [(one["partition"], one["offset"], name) for one in shown["messages"]]

            await eventually(history, lambda places: set(places) <= found)


async def test_a_group_is_known_everywhere_at_once_and_goes_only_when_no_shard_needs_it(
    rests: list[Rest], topic: str, group: str
) -> None:
    (await rests[0].put_group(group, topics=["other"], policy=QUIET)).expect(201)
    (await rests[1].put_group(group, topics=["other", topic], policy=QUIET)).expect(200)
    for shard in range(SHARDS):
        name = id_in(shard)
        (await rests[2].prepare(group, [message(topic)], as_id=name)).expect(201)
        for rest in rests:
            (await rest.call("DELETE", f"/groups/{group}")).refused(409, "group_in_use")
        await rests[0].rollback(name)
    assert (await rests[1].call("DELETE", f"/groups/{group}")).status == 204
    for rest in rests:
        (await rest.call("GET", f"/groups/{group}")).refused(404, "unknown_group")
        (await rest.prepare(group, [message(topic)])).refused(404, "unknown_group")
    (await rests[2].put_group(group, topics=[topic], policy=QUIET)).expect(201)
    for rest in rests:  # prepares are accepted again after the deletion
        await rest.rollback(await rest.prepared(group, [message(topic)]))


async def test_a_puller_gets_the_checks_of_all_shards_from_any_instance(
    rests: list[Rest], topic: str, group: str
) -> None:
    """Each check is handed out once, by any instance; a check that becomes due elsewhere ends a waiting poll."""
    policy = {"first_check_after_s": 0.2, "check_interval_s": 1000, "max_interval_s": 1000}
    await rests[0].put_group(group, topics=[topic], policy=policy)
    names = {id_in(shard) for shard in range(SHARDS)}
    for name in names:
        (await rests[1].prepare(group, [message(topic)], as_id=name)).expect(201)
    leased: list[str] = []
    while len(leased) < len(names):
        checks = await rests[2].lease(group, wait_s=20)
        assert checks, "nothing came due"
        leased += [check["id"] for check in checks]
        for check in checks:
            end = await rests[0].end(check["id"], "rollback", check_id=check["check_id"])
            assert end.expect(200)["changed"]
    assert sorted(leased) == sorted(names)
    for name in names:
        assert (await rests[1].show(name))["cause"] == "check"

    for rest in rests:
        waiting = asyncio.create_task(rest.lease(group, wait_s=30))
        foreign = next(iter(set(range(SHARDS)) - await served_by(rest)))
        name = id_in(foreign)
        (await rests[0].prepare(group, [message(topic)], as_id=name)).expect(201)
        [check] = await waiting
        assert check["id"] == name
        await rest.rollback(name)


async def test_the_checks_of_all_shards_are_pushed_to_a_stream_at_any_instance(
    rests: list[Rest], topic: str, group: str
) -> None:
    policy = {"first_check_after_s": 0.2, "check_interval_s": 1000, "max_interval_s": 1000}
    await rests[0].put_group(group, topics=[topic], policy=policy)
    stream = await CheckedStream.connect(rests[2].session, rests[2].url)
    assert (await stream.subscribe(group, 2)).status == 200
    names = {id_in(shard) for shard in range(SHARDS)}
    answers = await asyncio.gather(*(stream.prepare(group, message(topic), id=name) for name in names))
    assert {answer.status for answer in answers} == {201}
    asked: list[str] = []
    while len(asked) < len(names):
        check = await asyncio.wait_for(stream.checks.get(), GENEROUS_S)
        asked.append(check["id"])
        ended = await stream.end(check["id"], "rollback", check_id=check["check_id"])
        assert ended.document["changed"] is True
    assert sorted(asked) == sorted(names)
    assert {(await rests[0].show(name))["cause"] for name in names} == {"check"}
    await stream.close()


async def test_an_instance_is_killed_and_another_joins_under_load(
    rests: list[Rest], fleet: Fleet, connect: Connect, cluster: Cluster, topic: str, group: str
) -> None:
    """The others take over, and only the necessary shards move; callers see only lost connections and 503."""
    await rests[0].put_group(group, topics=[topic], policy=QUIET)
    async with Callers(RoundRobin(rests[0].session, fleet.members), group, [topic], callers=6) as callers:
        await callers.committed(60)
        before = await shares(rests)
        fleet.members[2].kill()
        killed_at = time.monotonic()
        two = rests[:2]
        after = await eventually(lambda: shares(two), lambda found: set().union(*found) == set(range(SHARDS)))
        print(f"taken over after {time.monotonic() - killed_at:.1f} s; callers saw {callers.history.answers}")  # noqa: T201 - a figure to read
        assert after[0] >= before[0], "a shard of an instance that lives was moved"
        assert after[1] >= before[1], "a shard of an instance that lives was moved"
        callers.rest = RoundRobin(rests[0].session, fleet.members[:2])
        await callers.committed(60)

        before = after
        fresh = fleet.add()
        await asyncio.to_thread(fresh.start)
        three = [*two, connect(fresh)]
        after = await settled(three)
        assert after[0] < before[0], "it got a shard that it did not have"
        assert after[1] < before[1], "it got a shard that it did not have"
        callers.rest = RoundRobin(rests[0].session, [*fleet.members[:2], fresh])
        await callers.committed(60)
        await callers.finish()
    codes = {code for _, status, code in callers.history.answers if status == 503}
    assert codes <= {"shard_unavailable", "outcome_unknown", "end_unconfirmed", "kafka_unavailable"}
    await callers.history.audit(cluster, [topic])
    for rest in three:
        _, metrics = await rest.health("/metrics")
        [moved] = [line for line in metrics.splitlines() if line.startswith("halfway_shard_away_seconds_count")]
        assert float(moved.split()[1]) >= 2
