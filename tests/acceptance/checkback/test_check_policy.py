"""When and how often halfway sends checks, and their results; each with the cause in its op marker."""

import asyncio
from itertools import pairwise

from halfway.embedded.properties import HOST, pick_port
from halfway.protocol.policy import JITTER
from halfway.protocol.records import OpKind
from tests.support.coordinator.endpoints import CheckEndpoint, Endpoints
from tests.support.coordinator.process import NewCoordinator
from tests.support.coordinator.rest_client import NEVER_S, QUIET, Connect, Json, Rest, message, moment_ms
from tests.support.coordinator.topics import Cluster, InternalTopics
from tests.support.waiting import eventually, until_true

# Clocks are read to the millisecond, and rounded.
ROUNDING_MS = 2
SOON = {"first_check_after_s": 0.2, "check_interval_s": 0.2, "max_interval_s": 0.2, "max_checks": 1000}
TWICE = {**SOON, "max_checks": 2}


async def test_no_check_before_the_first_is_due(rest: Rest, endpoint: CheckEndpoint, group: str, topic: str) -> None:
    """`first_check_after_s` of the group, or the transaction's own `check_after_s`, sooner or later than that."""
    first_s = 1.0
    (
        await rest.put_group(
            group, topics=[topic], urls=[endpoint.url], policy={**SOON, "first_check_after_s": first_s}
        )
    ).expect(201)
    own = {None: first_s, 0.3: 0.3, 2.0: 2.0}
    prepared = {
        due_s: (await rest.prepare(group, [message(topic)], check_after_s=given)).expect(201)
        for given, due_s in own.items()
    }

    for due_s, answer in prepared.items():
        asked, *_ = await endpoint.until_asked(about=answer["id"])
        prepared_at = moment_ms(answer["prepared_at"])
        assert asked.at_ms >= prepared_at + due_s * 1000 - ROUNDING_MS
        assert moment_ms(answer["next_check_at"]) == prepared_at + due_s * 1000
        assert asked.attempt == 1
        await rest.rollback(answer["id"])


async def test_no_check_after_an_end(rest: Rest, endpoint: CheckEndpoint, group: str, topic: str) -> None:
    """A transaction that ends before its first check is due is never checked, while another one of the group is."""
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=SOON)).expect(201)
    prepared = await asyncio.gather(*(rest.prepare(group, [message(topic)], check_after_s=8) for _ in range(10)))
    ended = [answer.expect(201) for answer in prepared]
    await asyncio.gather(
        *((rest.commit if number % 2 else rest.rollback)(answer["id"]) for number, answer in enumerate(ended))
    )
    control = await rest.prepared(group, [message(topic)])

    due = max(moment_ms(answer["next_check_at"]) for answer in ended)
    await until_true(
        lambda: [asked for asked in endpoint.asked if asked.at_ms > due + 1000], what="the control is asked"
    )
    await rest.commit(control)
    before = len(endpoint.asked)
    second_control = await rest.prepared(group, [message(topic)])
    await endpoint.until_asked(3, about=second_control)
    await rest.rollback(second_control)

    assert {asked.id for asked in endpoint.asked} == {control, second_control}
    assert {asked.id for asked in endpoint.asked[before + 1 :]} == {second_control}, "one may have been under way"


async def test_checks_come_at_growing_intervals_with_jitter_up_to_a_largest(
    rest: Rest, endpoint: CheckEndpoint, group: str, topic: str
) -> None:
    """Doubling from `check_interval_s` up to `max_interval_s`, each spread by the jitter."""
    policy = {"first_check_after_s": 0.1, "check_interval_s": 0.3, "max_interval_s": 1.2, "max_checks": 100}
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=policy)).expect(201)
    transaction = await rest.prepared(group, [message(topic)])
    shown = []
    for times in range(1, 6):
        await endpoint.until_asked(times, about=transaction)
        shown.append(await rest.until_checked(transaction, times))
    await rest.rollback(transaction)

    asked = endpoint.asked_about(transaction)
    assert [one.attempt for one in asked[:5]] == [1, 2, 3, 4, 5]
    expected_s = [0.3, 0.6, 1.2, 1.2]
    grown_s = {1: 0.3, 2: 0.6}
    for (earlier, later), expected in zip(pairwise(asked[:5]), expected_s, strict=True):
        assert later.at_ms - earlier.at_ms >= expected * 1000 * (1 - JITTER / 2) - ROUNDING_MS
    waits = set()
    for state in shown:
        wait = moment_ms(state["next_check_at"]) - moment_ms(state["last_check_at"])
        # By the time of the look one more may be recorded, or answered and not recorded yet.
        intervals = [grown_s.get(checks, 1.2) for checks in (state["checks"], state["checks"] + 1)]
        spread = [wait / 1000 / interval for interval in intervals]
        rounding = ROUNDING_MS / 1000 / min(intervals)
        of_one = [one for one in spread if abs(one - 1) <= JITTER / 2 + rounding]
        assert of_one, (wait, intervals)
        waits.add(of_one[0])
    assert len(waits) > 1, "no jitter"


async def test_only_checks_that_were_sent_count(
    rest: Rest, endpoints: Endpoints, internal: InternalTopics, group: str, topic: str
) -> None:
    """Refused connections do not use up the checks: a service that comes back gets the first check."""
    port = pick_port()
    urls = [f"http://{HOST}:{port}/check"]
    (await rest.put_group(group, topics=[topic], urls=urls, policy=TWICE)).expect(201)
    transaction = await rest.prepared(group, [message(topic)])
    attempted: set[str] = set()
    while len(attempted) < 5:
        shown = await eventually(
            lambda: rest.show(transaction), lambda shown: shown["last_check_at"] not in {None, *attempted}
        )
        attempted.add(shown["last_check_at"])
        assert "refused" in shown["last_error"]
    shown = await rest.show(transaction)
    assert (shown["state"], shown["checks"]) == ("prepared", 0)
    assert await internal.kinds(transaction) == []

    endpoint = await endpoints.check("unknown", port=port)

    await rest.until(transaction, "parked")
    assert [asked.attempt for asked in endpoint.asked_about(transaction)] == [1, 2]
    assert await internal.kinds(transaction) == [
        (OpKind.CHECKED, "check"),
        (OpKind.CHECKED, "check"),
        (OpKind.PARKED, "policy"),
    ]


async def test_a_long_wait_before_the_first_check_uses_none_up(
    rest: Rest, endpoint: CheckEndpoint, group: str, topic: str
) -> None:
    """RocketMQ counts while a message is immune; here the first check is the first."""
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=TWICE)).expect(201)
    immune = await rest.prepared(group, [message(topic)], check_after_s=NEVER_S)
    other = await rest.prepared(group, [message(topic)])
    await rest.until(other, "parked")

    assert endpoint.asked_about(immune) == []
    assert (await rest.show(immune))["checks"] == 0
    await rest.rollback(immune)
    await rest.rollback(other)


async def test_a_verdict_resolves_with_the_cause_check(
    rest: Rest, endpoint: CheckEndpoint, cluster: Cluster, internal: InternalTopics, group: str, topic: str
) -> None:
    """Commit and rollback; `unknown` first, which only counts."""
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=SOON)).expect(201)
    verdicts: dict[str, str] = {}
    endpoint.answer(lambda check: verdicts[check["id"]] if check["attempt"] > 1 else "unknown")
    committed = f"{group}.commit"
    rolled_back = f"{group}.rollback"
    verdicts |= {committed: "commit", rolled_back: "rollback"}
    await rest.prepared(group, [message(topic, "in")], as_id=committed)
    await rest.prepared(group, [message(topic, "out")], as_id=rolled_back)

    await rest.until(committed, "committed")
    await rest.until(rolled_back, "rolled_back")

    assert await internal.kinds(committed) == [(OpKind.CHECKED, "check"), (OpKind.COMMITTED, "check")]
    assert await internal.kinds(rolled_back) == [(OpKind.CHECKED, "check"), (OpKind.ROLLED_BACK, "check")]
    assert [record.value for record in await cluster.read(topic)] == [b"in"]
    for transaction in (committed, rolled_back):
        assert (await internal.ops(transaction))[-1].checks == 2


async def test_an_end_that_overtakes_a_check_wins(
    rest: Rest, endpoint: CheckEndpoint, cluster: Cluster, internal: InternalTopics, group: str, topic: str
) -> None:
    """A later verdict is dropped."""
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=SOON)).expect(201)
    release = asyncio.Event()

    async def late(_: Json) -> str:
        await release.wait()
        return "commit"

    endpoint.answer(late)
    transaction = await rest.prepared(group, [message(topic)])
    await endpoint.until_asked(about=transaction)

    await rest.rollback(transaction)
    release.set()

    control = await rest.prepared(group, [message(topic, "control")])
    await rest.until(control, "committed")
    assert (await rest.show(transaction))["state"] == "rolled_back"
    assert await internal.kinds(transaction) == [(OpKind.ROLLED_BACK, "producer")]
    assert [record.value for record in await cluster.read(topic)] == [b"control"]


async def test_a_restart_keeps_the_count_of_checks(
    new_coordinator: NewCoordinator, connect: Connect, endpoint: CheckEndpoint, group: str, topic: str
) -> None:
    """After a stop and after a crash the next check has the next number, and `max_checks` still applies."""
    coordinator = new_coordinator()
    coordinator.start()
    rest = connect(coordinator)
    policy = {"first_check_after_s": 0.2, "max_checks": 5}
    never_again = {**policy, "check_interval_s": NEVER_S, "max_interval_s": NEVER_S}
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=never_again)).expect(201)
    transaction = await rest.prepared(group, [message(topic)])
    await rest.until_checked(transaction, 1)

    for crash, expected in ((False, 2), (True, 3)):
        if crash:
            coordinator.kill()
        else:
            coordinator.stop()
        coordinator.start()
        assert (await rest.show(transaction))["checks"] == expected - 1
        (await rest.check(transaction)).expect(202)
        asked = await endpoint.until_asked(expected, about=transaction)
        assert asked[-1].attempt == expected
        await rest.until_checked(transaction, expected)

    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy={**SOON, "max_checks": 5})).expect(200)
    (await rest.check(transaction)).expect(202)
    shown = await rest.until(transaction, "parked")
    assert shown["checks"] == 5
    assert [asked.attempt for asked in endpoint.asked_about(transaction)] == [1, 2, 3, 4, 5]


async def test_checks_rotate_over_the_endpoints_of_a_group(
    rest: Rest, endpoints: Endpoints, group: str, topic: str
) -> None:
    """Each endpoint gets its share, and if one is down, another one is called at once."""
    first, second = await endpoints.check("rollback"), await endpoints.check("rollback")
    down = f"http://{HOST}:{pick_port()}/check"
    urls = [first.url, down, second.url]
    (await rest.put_group(group, topics=[topic], urls=urls, policy=SOON)).expect(201)
    transactions = await asyncio.gather(*(rest.prepared(group, [message(topic)]) for _ in range(12)))

    for transaction in transactions:
        shown = await rest.until(transaction, "rolled_back")
        assert shown["checks"] == 1
    assert len(first.asked) + len(second.asked) == 12
    assert len(first.asked) >= 3
    assert len(second.asked) >= 3


async def test_a_service_that_comes_back_is_asked_without_doing_anything(
    rest: Rest, endpoint: CheckEndpoint, group: str, topic: str
) -> None:
    """RocketMQ does not see a restarted producer before it sends."""
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=SOON)).expect(201)
    transaction = await rest.prepared(group, [message(topic)])
    await endpoint.until_asked(about=transaction)
    await endpoint.stop()
    await eventually(lambda: rest.show(transaction), lambda shown: "refused" in (shown["last_error"] or ""))

    endpoint.answer("commit")
    await endpoint.start()

    assert (await rest.until(transaction, "committed"))["cause"] == "check"


async def test_a_check_can_be_asked_for(rest: Rest, endpoint: CheckEndpoint, group: str, topic: str) -> None:
    """It is sent early and answered with 202; its verdict resolves; an ended transaction cannot be checked."""
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=QUIET)).expect(201)
    transaction = await rest.prepared(group, [message(topic)])

    (await rest.check(transaction)).expect(202)
    await endpoint.until_asked(about=transaction)
    await rest.until_checked(transaction, 1)
    endpoint.answer("commit")
    (await rest.check(transaction)).expect(202)

    shown = await rest.until(transaction, "committed")
    assert (shown["checks"], shown["cause"]) == (2, "check")
    assert [asked.attempt for asked in endpoint.asked] == [1, 2]
    (await rest.check(transaction)).refused(409, "already_ended")


async def test_a_young_transaction_does_not_hold_up_those_behind_it(
    rest: Rest, endpoint: CheckEndpoint, group: str, topic: str
) -> None:
    """RocketMQ's scan stops at the first transaction that is not due; here each has its own time."""
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=SOON)).expect(201)
    endpoint.answer("rollback")
    young = [await rest.prepared(group, [message(topic)], check_after_s=NEVER_S) for _ in range(4)]
    behind = [await rest.prepared(group, [message(topic)]) for _ in range(4)]

    for transaction in behind:
        await rest.until(transaction, "rolled_back")
    for transaction in young:
        assert endpoint.asked_about(transaction) == []
        await rest.rollback(transaction)


async def test_checks_do_not_write_the_half_again(
    rest: Rest, endpoint: CheckEndpoint, internal: InternalTopics, group: str, topic: str
) -> None:
    """RocketMQ puts the body back at the tail before each check."""
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=SOON)).expect(201)
    transaction = await rest.prepared(group, [message(topic)])
    await endpoint.until_asked(4, about=transaction)
    assert len(await internal.halves(transaction)) == 1
    await rest.rollback(transaction)


async def test_policies_that_contradict_themselves_are_refused(rest: Rest, group: str, topic: str) -> None:
    for policy, field in (
        ({"first_check_after_s": 10, "max_age_s": 5}, "policy.first_check_after_s"),
        ({"check_interval_s": 10, "max_interval_s": 5}, "policy.max_interval_s"),
        ({"max_age_s": 10**7}, "policy.max_age_s"),
    ):
        answer = await rest.put_group(group, topics=[topic], policy=policy)
        assert [error["field"] for error in answer.expect(422)["errors"]] == [field]
    (await rest.call("GET", f"/groups/{group}")).refused(404, "unknown_group")
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    (await rest.call("DELETE", f"/groups/{group}")).expect(204)
