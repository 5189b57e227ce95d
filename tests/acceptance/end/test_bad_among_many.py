"""One end that cannot be written among two hundred: the others are committed, with little load on Kafka."""

from http import HTTPStatus

from tests.support.coordinator.by_hand import total
from tests.support.coordinator.process import NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, Json, Rest, message, preparation
from tests.support.coordinator.topics import Cluster
from tests.support.waiting import eventually

GOOD = 199
MOST_KAFKA_TRANSACTIONS = 60
"""Far below one for each end."""
PATIENT = {"HALFWAY_REQUEST_TIMEOUT_S": "60"}


async def prepare_many(rest: Rest, group: str, topic: str) -> list[str]:
    items = [preparation(group, [message(topic, f"{number}")]) for number in range(GOOD)]
    answered = (await rest.batch(prepare=items)).expect(200)["prepare"]
    assert {item["status"] for item in answered} == {201}
    return [item["body"]["id"] for item in answered]


async def end_together(rest: Rest, bad: str, good: list[str]) -> tuple[Json, list[Json]]:
    """Commit all at once, with the bad one in the middle; repeat the good ones after each 503.

    All are in one request: a slow client would send many requests in several waves.
    """
    half = len(good) // 2
    wanted, refused, ended = [*good[:half], bad, *good[half:]], dict[str, Json](), dict[str, Json]()
    while wanted:
        items = (await rest.batch(end=[{"id": one, "outcome": "commit"} for one in wanted])).expect(200)["end"]
        answers = dict(zip(wanted, items, strict=True))
        if bad in answers:
            refused[bad] = answers.pop(bad)
        ended |= {one: item["body"] for one, item in answers.items() if item["status"] == HTTPStatus.OK}
        wanted = [one for one, item in answers.items() if item["status"] == HTTPStatus.SERVICE_UNAVAILABLE]
    return refused[bad], [ended[one] for one in good]


async def assert_bounded(rest: Rest, before: float) -> None:
    """The incarnation ended at most once, and there were few Kafka transactions."""
    assert await total(rest, "halfway_lane_failures_total") <= 1
    assert await total(rest, "halfway_lane_batch_ends_count") - before <= MOST_KAFKA_TRANSACTIONS


async def assert_each_stored_once(cluster: Cluster, topic: str) -> None:
    values = sorted(int(record.value or b"-1") for record in await cluster.read(topic))
    assert values == list(range(GOOD))


async def test_a_message_that_has_become_too_large_for_its_topic(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, group: str
) -> None:
    """The limit was lowered after the prepare: 199 to the same topic are committed, the other waits with the reason."""
    rest = connect(new_coordinator(PATIENT).start())
    topic = await cluster.make_topic("small", config={"max.message.bytes": "400000"})
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    bad = await rest.prepared(group, [message(topic, "x" * 300_000)])
    good = await prepare_many(rest, group, topic)
    before = await total(rest, "halfway_lane_batch_ends_count")
    await cluster.set_config(topic, "max.message.bytes", "100000")

    _, answers = await end_together(rest, bad, good)

    assert {answer["state"] for answer in answers} == {"committed"}
    again = await eventually(lambda: rest.end(bad, "commit"), lambda answer: answer.error_code == "message_too_large")
    assert topic in again.refused(413, "message_too_large")["detail"]
    shown = await rest.show(bad)
    assert shown["state"] == "prepared"
    assert "message_too_large" in shown["last_error"]
    await assert_bounded(rest, before)
    await assert_each_stored_once(cluster, topic)

    await cluster.set_config(topic, "max.message.bytes", "400000")
    await eventually(lambda: rest.end(bad, "commit"), lambda answer: answer.status == 200)
