"""Repeats of prepares with an id, and ids that nobody knows."""

import asyncio
from collections import Counter

import pytest

from tests.support.coordinator.rest_client import QUIET, Rest, message
from tests.support.coordinator.topics import Cluster, InternalTopics
from tests.support.ids import new_id


class TestPreparingAgain:
    """A prepare whose answer was lost is sent again with the same id."""

    async def test_the_same_content_is_one_half_and_one_transaction(
        self, rest: Rest, internal: InternalTopics, quiet: str, topic: str
    ) -> None:
        own = new_id()
        messages = [message(topic, "v", key="k", headers=[{"name": "h", "value": "1"}])]

        first = await rest.prepare(quiet, messages, as_id=own)
        second = await rest.prepare(quiet, messages, as_id=own)

        assert (first.status, second.status) == (201, 200)
        assert first.body == second.body
        assert first.body["id"] == own
        assert first.headers["Location"].endswith(f"/v1/transactions/{own}")
        assert len(await internal.halves(own)) == 1

    async def test_other_content_is_a_conflict_and_changes_nothing(
        self, rest: Rest, cluster: Cluster, internal: InternalTopics, quiet: str, topic: str
    ) -> None:
        own = new_id()
        await rest.prepared(quiet, [message(topic, "first", key="k")], as_id=own)

        for other in (
            [message(topic, "second", key="k")],
            [message(topic, "first", key="l")],
            [message(topic, "first")],
            [message(topic, "first", key="k", headers=[{"name": "h", "value": "1"}])],
            [message(topic, "first", key="k"), message(topic, "first", key="k")],
        ):
            (await rest.prepare(quiet, other, as_id=own)).refused(409, "id_reused")

        assert len(await internal.halves(own)) == 1
        await rest.commit(own)
        assert [record.value for record in await cluster.read(topic)] == [b"first"]

    async def test_an_id_is_unique_across_groups(self, rest: Rest, quiet: str, topic: str) -> None:
        """The id of another group is in use, and the answer reveals nothing about that group."""
        other = f"{quiet}-other"
        (await rest.put_group(other, topics=[topic], policy=QUIET)).expect(201)
        own = new_id()
        await rest.prepared(quiet, [message(topic)], as_id=own)

        problem = (await rest.prepare(other, [message(topic)], as_id=own)).refused(409, "id_reused")

        assert quiet not in problem["detail"].replace(other, "")

    async def test_many_at_one_instant_are_one_half(
        self, rest: Rest, internal: InternalTopics, quiet: str, topic: str
    ) -> None:
        own = new_id()

        answers = await asyncio.gather(*(rest.prepare(quiet, [message(topic)], as_id=own) for _ in range(20)))

        assert Counter(answer.status for answer in answers) == {201: 1, 200: 19}
        assert len(await internal.halves(own)) == 1


@pytest.mark.parametrize("call", ["get", "commit", "rollback", "unknown", "check", "resume"])
async def test_an_unknown_one_is_not_found_which_does_not_mean_rolled_back(rest: Rest, call: str) -> None:
    """Also one of a form of releases before, and one with a shard that does not exist."""
    made = new_id()
    for unknown in (made, f"order-{made}", f"0-{made}", f"1-{made}", f"9-{made}", f"65000-{made}"):
        if call in {"get", "check", "resume"}:
            answer = await getattr(rest, call)(unknown)
        else:
            answer = await rest.end(unknown, call)
        assert "does not mean" in answer.refused(404, "unknown_transaction")["detail"]
