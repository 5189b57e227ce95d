"""An instance that is frozen past its session, wakes, and continues its commit.

Two rules prevent it from changing what others have decided (docs/protocol.md): the next owner fences the
lane of the former owner, and no lane initialises its own id again. The tests show each rule by its absence.
"""

import asyncio
from collections.abc import Sequence

import pytest

from tests.faults import plan
from tests.support.coordinator.faulty import FaultyCoordinator, NewFaultyCoordinator
from tests.support.coordinator.fleet import RoundRobin
from tests.support.coordinator.rest_client import QUIET, Connect, message
from tests.support.coordinator.topics import Cluster
from tests.support.waiting import until_true

_AT = "lane.write.before"
"""The write is claimed and admitted, and no byte of it has left the process."""
_SESSION = {"HALFWAY_SESSION_TIMEOUT_S": "10"}
"""Long enough for the test on a slow machine."""
_UNFENCED = plan.Fault(point="acquire.3.fence.before", action="skip", times=0)
_AGAIN = plan.Fault(point=_AT, action="initialise")


def beside(first: FaultyCoordinator, second: FaultyCoordinator) -> FaultyCoordinator:
    """Make the second coordinator another instance of the first one's cluster."""
    second.prefix = first.prefix
    first.alone = second.alone = False
    second.settings["HALFWAY_KAFKA_PREFIX"] = first.prefix
    return second


@pytest.mark.parametrize(
    "of_the_zombie,of_the_successor,decided_twice",
    [((), (), False), ((), (_UNFENCED,), True), ((_AGAIN,), (), True)],
    ids=["whole", "without the fence of step 3", "with its own id initialised again"],
)
async def test_a_commit_that_slept_past_its_session(
    faulty_coordinator: NewFaultyCoordinator,
    connect: Connect,
    cluster: Cluster,
    topic: str,
    group: str,
    of_the_zombie: Sequence[plan.Fault],
    of_the_successor: Sequence[plan.Fault],
    decided_twice: bool,
) -> None:
    """Its successor rolled its transaction back: with the whole protocol no consumer ever sees its message."""
    zombie = faulty_coordinator(_SESSION).start()
    rest = connect(zombie)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    transaction = await rest.prepared(group, [message(topic, "of the zombie")])
    over = plan.Fault(point="lane.5.commit.after" if decided_twice else "lane.suspect.before")
    zombie.faults.plan(plan.Fault(point=_AT, action="pause"), *of_the_zombie, over)
    commit = asyncio.create_task(rest.end(transaction, "commit"))
    await asyncio.to_thread(zombie.faults.until_reached, _AT)

    zombie.pause()
    try:
        successor = beside(zombie, faulty_coordinator(_SESSION))
        successor.faults.plan(*of_the_successor)
        await asyncio.to_thread(successor.start)
        there = connect(successor)
        rolled_back = await there.end(transaction, "rollback", retry=True)
        assert rolled_back.expect(200)["state"] == "rolled_back"
        zombie.faults.release()
    finally:
        zombie.resume()

    # Not before the commit was answered: the zombie may learn from its group at any time.
    await asyncio.to_thread(zombie.faults.until_reached, over.point)
    await until_true(lambda: '"incarnation_failed"' in zombie.log, what="the zombie knows that it is one")
    commit.cancel()
    seen = [record.value for record in await cluster.read(topic)]
    assert seen == ([b"of the zombie"] if decided_twice else [])
    if not decided_twice:
        either = RoundRobin(rest.session, [zombie, successor])  # its shard may have moved back since
        assert (await either.show(transaction, retry=True))["state"] == "rolled_back"
