"""A lane and a log that raise, repeat themselves and answer late: every caller gets one answer, and it is true."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

from halfway.coordinator.operations import Operation
from halfway.coordinator.ports import Appended, LaneAnswers, LaneWrite, Written
from halfway.coordinator.requests import End, EndResult, Prepared
from halfway.protocol.errors import AlreadyEndedError, LaneLostError, OutcomeUnknownError
from halfway.protocol.records import Half, Op, OpKind
from halfway.protocol.transactions import Outcome, State
from tests.support.service.begun import Begun
from tests.support.service.world import SHARDS, World
from tests.unit.coordinator.test_many_at_once import SENT, end, nothing_is_held, prepare

T = TypeVar("T")
LISTS = 150
DELAYS_S = (0, 0.002, 0.02, 0.022, 0.024)


class Hostile:
    """Stands between the service and its ports until `stop`."""

    def __init__(self, world: World, chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self._memory, self._chance, self._is_on = world.memory, chance, True
        lane, log = world.memory.lane, world.memory.half_log
        self._submit, self._append, self._answered = lane.submit, log.append, lane._answered
        lane.listen(self.take)
        monkeypatch.setattr(lane, "submit", self.submit)
        monkeypatch.setattr(log, "append", self.append)

    def stop(self) -> None:
        self._is_on = False

    def _chosen(self, *faults: Callable[[], object], otherwise: Callable[[], object]) -> None:
        """Call one of the faults, or do what is right."""
        self._chance.choice([*faults, *[otherwise] * 2 * len(faults)] if self._is_on else [otherwise])()

    def _later(self, call: Callable[[T], object], argument: T) -> None:
        asyncio.get_running_loop().call_later(self._chance.choice(DELAYS_S), call, argument)

    def submit(self, writes: Sequence[LaneWrite]) -> None:
        if self._is_on and self._chance.random() < 0.03:
            raise RuntimeError
        self._submit(writes)

    def take(self, answers: LaneAnswers) -> None:
        self._chosen(
            lambda: [self._answered([answer]) for answer in answers],
            lambda: self._answered([*answers, *answers]),
            lambda: self._later(self._answered, answers),
            lambda: self._give_up(answers),
            otherwise=lambda: self._answered(answers),
        )

    def _give_up(self, answers: LaneAnswers) -> None:
        """End a lane that hangs after it has written: its own answers come late."""
        if any(isinstance(result, Written) for _, result in answers):
            lost = [(write, LaneLostError(id=write.id)) for write, _ in answers]
            self._memory.lose()
            self._answered(lost)
            for _ in range(5):
                self._later(self._answered, lost)
        self._later(self._answered, answers)

    def append(self, shard: int, halves: Sequence[tuple[Half, T]], appended: Appended[T], *, deadline: float) -> None:
        def append(some: Sequence[tuple[Half, T]], appended: Appended[T]) -> None:
            self._append(shard, some, appended, deadline=deadline)

        def raise_half_way() -> None:
            append(halves[: len(halves) // 2], appended)
            raise RuntimeError

        def answer_too_early() -> None:
            appended([(token, OutcomeUnknownError("not confirmed in time")) for _, token in halves])
            append(halves, appended)

        def twice(results: Sequence[tuple[T, int | Exception]]) -> None:
            appended(results)
            appended(results)

        self._chosen(
            raise_half_way,
            answer_too_early,
            lambda: append(halves, twice),
            lambda: append(halves, lambda results: self._later(appended, results)),
            otherwise=lambda: append(halves, appended),
        )


def outcomes(world: World) -> dict[str, State]:
    """Return the outcome of each id in the log; each was written once, with its messages or without."""
    final = [
        record.value
        for shard in world.memory.log.shards
        for record in shard.op.records
        if isinstance(record.value, Op) and record.value.kind.final
    ]
    assert set(Counter(op.id for op in final).values()) <= {1}
    written = Counter(dict(record.headers)["halfway-transaction-id"] for record in world.memory.records("orders"))
    assert written == Counter(op.id.encode() for op in final if op.kind is OpKind.COMMITTED)
    return {op.id: State.COMMITTED if op.kind is OpKind.COMMITTED else State.ROLLED_BACK for op in final}


def judge(asked: End, answer: object, outcome: dict[str, State]) -> None:
    """Fail if an answer to an end contradicts the log, or belongs to another end."""
    if isinstance(answer, EndResult):
        assert answer.id == asked.id
        if asked.outcome is not Outcome.UNKNOWN:
            assert answer.state is outcome[asked.id]
            assert (asked.outcome is Outcome.COMMIT) == (answer.state is State.COMMITTED)
    elif isinstance(answer, AlreadyEndedError):
        assert (answer.fields["id"], answer.fields["state"]) == (asked.id, outcome[asked.id])
    else:
        assert isinstance(answer, Exception)


@pytest.mark.parametrize("seed", range(4))
async def test_every_answer_is_true_and_comes_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, world = random.Random(seed), await World.start()
    await world.group()
    hostile = Hostile(world, chance, monkeypatch)
    prepares: list[Begun[Prepared]] = []
    ends: list[tuple[list[End], Begun[EndResult]]] = []
    single: list[tuple[End, Operation[EndResult]]] = []
    for _ in range(LISTS):
        made = [one.id for answers in prepares for one in answers.results if isinstance(one, Prepared)]
        wanted = [end(chance, SENT + made) for _ in range(chance.randint(1, 6))]
        deadline = world.deadline(chance.choice([0.001, 0.02, 5, 5, 5]))
        prepares.append(world.begin_prepares([prepare(chance) for _ in wanted], deadline=deadline))
        ends.append((wanted, world.begin_ends(wanted, deadline=deadline)))
        single.append((wanted[0], world.coordinator.end(wanted[0], deadline=deadline)))
        for _ in range(chance.randint(0, 4)):
            await asyncio.sleep(chance.choice([0, 0, 0, 0.001]))
        if chance.random() < 0.2:
            prepares[-1].abandon()
            ends[-1][1].abandon()
            single[-1][1].cancel()
    hostile.stop()
    await world.until(lambda: not any(answers.left for answers in prepares))
    await world.until(lambda: not any(answers.left for _, answers in ends))
    await world.until(lambda: all(answer.result is not None for _, answer in single) and nothing_is_held(world))
    await world.until(lambda: len(world.coordinator.shards.served) == SHARDS)
    await asyncio.sleep(2 * max(DELAYS_S))

    outcome = outcomes(world)
    changed: Counter[str] = Counter()
    answered: list[tuple[End, object]] = []
    for wanted, answers in ends:
        answered += zip(wanted, answers.results, strict=True)
    answered += [(asked, answer.result) for asked, answer in single]
    for asked, answer in answered:
        judge(asked, answer, outcome)
        changed[asked.id] += isinstance(answer, EndResult) and answer.changed
    assert set(changed.values()) <= {0, 1}
    served = [known(world, number) for number in range(SHARDS)]
    again = await world.restart()
    assert [known(again, number) for number in range(SHARDS)] == served, "the log gives the same"
    await again.stop()


def known(world: World, number: int) -> tuple[set[str], set[str]]:
    """Return the ids that are pending in a shard, and those that ended."""
    state = world.coordinator.shards.get(number).state
    return {one.id for one in state.pending()}, {one.id for one in state.ended()}
