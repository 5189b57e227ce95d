"""Network failures at the commit of the lane's Kafka transaction, by a proxy between halfway and the broker.

After each of them: each acknowledged end is stored exactly once, each caller gets an answer within the time of a
request, and no incarnation initialises one of its lane ids a second time.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator

import pytest
from confluent_kafka import Producer

from tests.support.brokers.proxied import ProxiedKafka
from tests.support.brokers.proxy import Api, Fate, Intervention, Request
from tests.support.coordinator.callers import Callers
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.rest_client import QUIET, Rest
from tests.support.coordinator.topics import Cluster
from tests.support.waiting import until_true

pytestmark = pytest.mark.xdist_group("proxied_kafka")

_LANE_ID = re.compile(r"(?P<incarnation>[0-9a-f]{16})\.(?P<lane>[01q])")
SETTINGS = {
    # A caller's deadline is before that of the lane, so that there are callers of both kinds.
    "HALFWAY_REQUEST_TIMEOUT_S": "2",
    # So much later that an answer can be released between the two on a slow machine.
    "HALFWAY_TRANSACTION_TIMEOUT_S": "21",
}
_FAILED = '"event": "incarnation_failed"'


class Scene:
    """A coordinator behind the proxy, and its incarnations since the start of the test."""

    def __init__(self, kafka: ProxiedKafka, coordinator: CoordinatorProcess, callers: Callers) -> None:
        self.callers = callers
        self._kafka = kafka
        self._proxy = kafka.proxy
        self._coordinator = coordinator
        self._incarnations = len(self._initialised()) // 3
        self._failures = coordinator.log.count(_FAILED)

    async def meets_a_commit(self, fate: Fate) -> Intervention:
        """Apply a failure to the next commit of the lane, and return when it was applied."""
        intervention = self._proxy.intervene(fate, self._commits)
        await until_true(intervention.met.is_set, what="the lane commits")
        return intervention

    def _commits(self, request: Request) -> bool:
        return request.api is Api.END_TXN and bool(request.commits) and self._lane(request) is not None

    def _lane(self, request: Request) -> re.Match[str] | None:
        name = request.transactional_id
        if not name.startswith(self._coordinator.prefix):
            return None
        return _LANE_ID.fullmatch(name.removeprefix(self._coordinator.prefix))

    async def fence(self, transactional_id: str) -> None:
        """Fence a transactional id, as the next owner does, without the proxy."""
        producer = Producer({"bootstrap.servers": self._kafka.bootstrap_servers, "transactional.id": transactional_id})
        await asyncio.to_thread(producer.init_transactions, 180)

    def _initialised(self) -> dict[str, int]:
        """Count how often each incarnation initialised each of its own lane ids.

        Whatever comes when a later incarnation has begun (its own lane ids are the first that it initialises) is that
        one fencing its predecessor.
        """
        latest = ""
        counts: dict[str, int] = {}
        seen: set[str] = set()
        for exchange in list(self._proxy.journal):
            lane = self._lane(exchange.request)
            if exchange.request.api is not Api.INIT_PRODUCER_ID or lane is None:
                continue
            incarnation = lane["incarnation"]
            if incarnation not in seen:
                seen.add(incarnation)
                latest = incarnation
            if incarnation == latest and exchange.error == 0:
                counts[lane[0]] = counts.get(lane[0], 0) + 1
        return counts

    async def judge(self, *, more_incarnations: int) -> None:
        """End the load, compare the acknowledgements with the topics, and count the incarnations."""
        await self.callers.committed(20)
        await self.callers.finish()
        history = self.callers.history
        assert history.cut == []
        await history.audit(Cluster(self._kafka.bootstrap_servers), self.callers.topics)
        initialised = self._initialised()
        assert set(initialised.values()) == {1}, f"by its own incarnation a lane id is initialised once: {initialised}"
        assert len(initialised) == 3 * (self._incarnations + more_incarnations), initialised
        assert self._coordinator.log.count(_FAILED) == self._failures + more_incarnations


@pytest.fixture(scope="module")
def _shared(_proxied: ProxiedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    """Start a coordinator that reaches Kafka only through the proxy."""
    coordinator = CoordinatorProcess(_proxied.through(_proxied.proxy), tmp_path_factory.mktemp("proxied"), SETTINGS)
    yield coordinator
    coordinator.close()


@pytest.fixture
async def scene(
    proxied_kafka: ProxiedKafka, coordinator: CoordinatorProcess, rest: Rest, group: str
) -> AsyncIterator[Scene]:
    """Start a coordinator under load."""
    topics = await Cluster(proxied_kafka.bootstrap_servers).make_topics("orders", "points")
    (await rest.put_group(group, topics=topics, policy=QUIET)).expect(200, 201)
    async with Callers(rest, group, topics, callers=4) as callers:
        scene = Scene(proxied_kafka, coordinator, callers)
        await callers.committed(20)
        yield scene


async def test_an_answer_that_comes_late_is_waited_for(scene: Scene) -> None:
    """After the caller's deadline, before that of the lane: 503, and a repeat of the end is 200."""
    held = await scene.meets_a_commit(Fate.HOLD_ANSWER)
    await until_true(lambda: scene.callers.history.refused("end"), what="a caller's time is over")
    held.release()
    await scene.judge(more_incarnations=0)


@pytest.mark.parametrize("fate", [Fate.LOSE_ANSWER, Fate.LOSE_REQUEST])
async def test_a_connection_that_breaks_at_the_commit_costs_an_incarnation_and_no_answer(
    scene: Scene, fate: Fate
) -> None:
    """Whether the broker did it or not: the commit is requested again, and the producer is not used any more."""
    for _ in range(2):
        await scene.meets_a_commit(fate)
        await scene.callers.committed(10)
    await scene.judge(more_incarnations=2)


async def test_a_commit_that_strays_on_a_lost_connection_commits_nothing_else(scene: Scene) -> None:
    """It arrives long after the repeated request: it must not affect a later transaction.

    It would commit what the broker has of the producer's next one, and the rest of that would be refused.
    """
    stray = await scene.meets_a_commit(Fate.STRAY_REQUEST)
    await scene.callers.committed(30)
    stray.release()
    await scene.judge(more_incarnations=1)


@pytest.mark.parametrize("fate", [Fate.HOLD_ANSWER, Fate.HOLD_REQUEST])
async def test_a_commit_that_is_never_answered_ends_the_incarnation(scene: Scene, fate: Fate) -> None:
    """The next incarnation fences it and reads the result of the batch in the log; the late answer changes nothing."""
    held = await scene.meets_a_commit(fate)
    await scene.callers.committed(20)
    held.release()
    await scene.judge(more_incarnations=1)


@pytest.mark.parametrize("fate", [Fate.HOLD_ANSWER, Fate.HOLD_REQUEST])
async def test_a_fence_between_a_commit_and_its_answer(scene: Scene, fate: Fate) -> None:
    """Commits before the fence stand; commits after it are refused and written again."""
    held = await scene.meets_a_commit(fate)
    [exchange] = held.exchanges
    await scene.fence(exchange.request.transactional_id)
    held.release()
    await scene.judge(more_incarnations=1)
    assert (exchange.error == 0) is (fate is Fate.HOLD_ANSWER), "what the broker said to that commit"
