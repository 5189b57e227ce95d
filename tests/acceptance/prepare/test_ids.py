"""Ids of other groups, and ids that nobody knows."""

import pytest

from tests.support.coordinator.rest_client import QUIET, Rest, message
from tests.support.ids import new_id


async def test_an_id_is_unique_across_groups(rest: Rest, quiet: str, topic: str) -> None:
    """The id of another group is in use, and the answer reveals nothing about that group."""
    other = f"{quiet}-other"
    (await rest.put_group(other, topics=[topic], policy=QUIET)).expect(201)
    own = new_id()
    await rest.prepared(quiet, [message(topic)], as_id=own)

    problem = (await rest.prepare(other, [message(topic)], as_id=own)).refused(409, "id_reused")

    assert quiet not in problem["detail"].replace(other, "")


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
