"""One outcome forever: ends that are repeated, contradict each other, or come late or after a restart."""

import asyncio
from collections import Counter
from functools import partial

import pytest

from halfway.protocol.records import OpKind
from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, Rest, message
from tests.support.coordinator.topics import Cluster, InternalTopics
from tests.support.ids import new_id
from tests.support.waiting import eventually

PAIRS = 100
FINAL = {OpKind.COMMITTED, OpKind.ROLLED_BACK}


async def test_two_contradicting_ends_at_one_instant_have_one_outcome(
    rest: Rest, cluster: Cluster, internal: InternalTopics, quiet: str, topic: str
) -> None:
    """A hundred times: one of the two is 200, the other 409, and topic and op marker agree with the 200."""
    transactions = await asyncio.gather(
        *(rest.prepared(quiet, [message(topic, f"v{number}")]) for number in range(PAIRS))
    )

    async def race(number: int, transaction: str) -> str:
        outcomes = ("commit", "rollback") if number % 2 else ("rollback", "commit")
        answers = await asyncio.gather(*(rest.end(transaction, outcome) for outcome in outcomes))
        assert sorted(answer.status for answer in answers) == [200, 409], answers
        (won,) = (answer.body for answer in answers if answer.status == 200)
        (lost,) = (answer.body for answer in answers if answer.status == 409)
        assert won["changed"] is True
        assert lost["state"] == won["state"]
        return str(won["state"])

    states = dict(
        zip(transactions, await asyncio.gather(*(race(*pair) for pair in enumerate(transactions))), strict=True)
    )

    print(Counter(states.values()))  # noqa: T201  shown with a failure
    delivered = Counter(record.transaction_id for record in await cluster.read(topic))
    assert delivered == Counter(transaction for transaction, state in states.items() if state == "committed")
    finals = [(op.id, op.kind.lower()) for op in await internal.ops() if op.id in states and op.kind in FINAL]
    assert sorted(finals) == sorted(states.items())
    for transaction in transactions[:5]:
        assert (await rest.show(transaction))["state"] == states[transaction]


class TestAfterTheOutcomeHorizon:
    """Outcomes are remembered for a time; after it the answer says that, and never "rolled back"."""

    HORIZON_S = 1

    @pytest.fixture
    def short_horizon(self, new_coordinator: NewCoordinator) -> CoordinatorProcess:
        return new_coordinator({"HALFWAY_OUTCOME_HORIZON_S": str(self.HORIZON_S)}).start()

    async def test_an_end_of_an_expired_outcome_is_gone_and_writes_nothing(
        self, short_horizon: CoordinatorProcess, connect: Connect, cluster: Cluster, group: str, topic: str
    ) -> None:
        """410 `outcome_expired`, also after a restart, for a prepare of the id as well."""
        rest = connect(short_horizon)
        (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
        made = [await rest.prepared(group, [message(topic, "in")]), await rest.prepared(group, [message(topic, "out")])]
        own = await rest.prepared(group, [message(topic, "own")], as_id=new_id())
        old = await rest.prepared(group, [message(topic, "old")])
        await rest.commit(made[0])
        await rest.rollback(made[1])
        made.append(own)
        await rest.commit(own)

        for restarted in (False, True):
            if restarted:
                short_horizon.stop()
                short_horizon.start()
            # Recovery may have read more than necessary; the scan forgets it.
            for transaction in made:
                await eventually(partial(rest.get, transaction), lambda answer: answer.status == 410)
            for transaction in made:
                for outcome in ("commit", "rollback", "unknown"):
                    problem = (await rest.end(transaction, outcome)).refused(410, "outcome_expired")
                    assert "does not mean" in problem["detail"]
            again = await rest.prepare(group, [message(topic, "own")], as_id=own)
            assert "use a new id" in again.refused(410, "outcome_expired")["detail"]
        assert len(await cluster.read(topic)) == 2

        assert (await rest.commit(old))["changed"] is True, "a pending transaction is never too old to be ended"
        assert len(await cluster.read(topic)) == 3
