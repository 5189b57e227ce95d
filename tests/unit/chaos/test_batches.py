"""The batches of the chaos harness give every producer the answer to its own item."""

import asyncio
import random
from collections.abc import Mapping

import pytest

from tests.chaos import batches
from tests.chaos.answer import NOTHING, Answer
from tests.chaos.batches import Batches

Body = Mapping[str, list[object]]


class Coordinator:
    """Answers each item of a batch with the item itself, or whatever it is told to."""

    def __init__(self) -> None:
        self.got: list[Body] = []
        self.groups: list[str] = []
        self.instead: Answer | None = None

    async def post(self, group: str, body: Body) -> Answer:
        self.got.append(body)
        self.groups.append(group)
        if self.instead is not None:
            return self.instead
        items = {kind: [{"status": 201, "body": {"id": item}} for item in given] for kind, given in body.items()}
        return Answer(status=200, body=items)


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture(autouse=True)
def _unbroken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BROKEN_OFF", 0)


def gathering(coordinator: Coordinator) -> Batches:
    return Batches(coordinator.post, random.Random(1))


async def test_each_gets_the_answer_to_its_own_item(coordinator: Coordinator) -> None:
    """Prepares and ends of one batch, in whatever order they came."""
    many = gathering(coordinator)
    answers = await asyncio.gather(
        many.send("shop", "end", "a"), many.send("shop", "prepare", "b"), many.send("shop", "end", "c")
    )
    assert [answer.text("id") for answer in answers] == ["a", "b", "c"]
    assert coordinator.got == [{"prepare": ["b"], "end": ["a", "c"]}]


async def test_a_batch_is_of_one_group(coordinator: Coordinator) -> None:
    """Its key reaches no other."""
    many = gathering(coordinator)
    answers = await asyncio.gather(*(many.send(group, "end", group) for group in ("shop", "other", "shop")))
    assert [answer.text("id") for answer in answers] == ["shop", "other", "shop"]
    sent = zip(coordinator.groups, coordinator.got, strict=True)
    assert sorted((group, body["end"]) for group, body in sent) == [("other", ["other"]), ("shop", ["shop", "shop"])]


async def test_a_problem_is_the_answer_of_its_item_alone(coordinator: Coordinator) -> None:
    """The others are answered as if it were not there."""
    items = [{"status": 201, "body": {"id": "a"}}, {"status": 503, "problem": {"error_code": "shard_unavailable"}}]
    coordinator.instead = Answer(status=200, body={"prepare": items, "end": []})
    many = gathering(coordinator)
    first, second = await asyncio.gather(many.send("shop", "prepare", "a"), many.send("shop", "prepare", "b"))
    assert (first.status, first.text("id")) == (201, "a")
    assert (second.status, second.text("error_code")) == (503, "shard_unavailable")


@pytest.mark.parametrize("answer", [NOTHING, Answer(status=429, body={"error_code": "too_many_requests"})])
async def test_what_the_whole_batch_was_answered_is_the_answer_of_each(
    coordinator: Coordinator, answer: Answer
) -> None:
    """Also where no answer came."""
    coordinator.instead = answer
    many = gathering(coordinator)
    answers = await asyncio.gather(many.send("shop", "prepare", "a"), many.send("shop", "end", "b"))
    assert list(answers) == [answer, answer]


async def test_a_full_batch_goes_at_once_and_the_next_one_begins(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is left out of both."""
    monkeypatch.setattr(batches, "MOST", 2)
    many = gathering(coordinator)
    answers = await asyncio.gather(*(many.send("shop", "end", str(number)) for number in range(5)))
    assert [answer.text("id") for answer in answers] == ["0", "1", "2", "3", "4"]
    assert [len(body["end"]) for body in coordinator.got] == [2, 2, 1]


async def test_a_producer_that_disappears_takes_no_other_with_it(coordinator: Coordinator) -> None:
    """Its item is sent all the same, as its request would have been."""
    many = gathering(coordinator)
    gone = asyncio.create_task(many.send("shop", "end", "gone"))
    await asyncio.sleep(0)
    stays = asyncio.create_task(many.send("shop", "end", "stays"))
    await asyncio.sleep(0)
    gone.cancel()
    assert (await stays).text("id") == "stays"
    assert coordinator.got == [{"prepare": [], "end": ["gone", "stays"]}]


async def test_a_connection_that_is_broken_off_answers_nobody(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the batch arrived is left open."""
    monkeypatch.setattr(batches, "BROKEN_OFF", 1)

    async def never(_: str, body: Body) -> Answer:
        coordinator.got.append(body)
        await asyncio.Event().wait()
        return NOTHING

    assert await Batches(never, random.Random(1)).send("shop", "end", "a") == NOTHING
    assert coordinator.got == [{"prepare": [], "end": ["a"]}]
