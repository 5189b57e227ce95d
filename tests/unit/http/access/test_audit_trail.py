"""The audit trail of calls over REST, through any instance."""

from halfway.protocol.records import AuditEvent
from tests.support.canary import Canaries
from tests.support.rest.client import SHOP
from tests.support.rest.guarded import Guarded, own_id
from tests.unit.http.access.test_matrix import BY_HAND, ORDER


def events(both: Guarded) -> list[AuditEvent]:
    return [event for world in (both.here, both.there) for event in world.memory.audit_trail.events]


async def test_what_is_done_to_keys_is_recorded_by_public_ids(both: Guarded) -> None:
    """With the actor and the owner of the key, and never with a key."""
    before = len(events(both))
    made = await both.call("operator", "POST", "/v1/keys", {"kind": "group", "name": "fresh"})
    rotated = await both.call("operator", "POST", f"/v1/keys/{made.body['id']}/rotate", {"keep_s": 0})
    listed = await both.call("operator", "GET", "/v1/keys?name=fresh")
    assert {one["id"]: one["valid"] for one in listed.body["keys"]} == {
        made.body["id"]: False,
        rotated.body["id"]: True,
    }
    await both.call("operator", "DELETE", f"/v1/keys/{made.body['id']}")
    await both.call("shop", "DELETE", f"/v1/keys/{made.body['id']}")
    found = events(both)[before:]
    assert rotated.error_code is None
    assert [(one.action, one.actor, one.subject, one.detail, one.result) for one in found] == [
        ("create_key", "first", made.body["id"], "of group fresh", "done"),
        ("rotate_key", "first", rotated.body["id"], "of group fresh", "done"),
        ("revoke_key", "first", made.body["id"], "of group fresh", "done"),
    ]
    keys = {"new key": made.body["key"], "rotated key": rotated.body["key"]}
    assert Canaries(keys | {name: text for name, text in both.tokens.items() if text}).found_in(repr(found)) == []


async def test_what_a_group_has_no_right_to_do_leaves_no_event(both: Guarded) -> None:
    """They are only counted: otherwise a group could fill the audit trail with attempts."""
    before = len(events(both))
    for path in ("/v1/groups/shop", "/v1/groups/new"):
        assert (await both.call("other", "PUT", path, SHOP)).status == 403
    granted = {**SHOP, "topics": ["orders", "coupons", "more"]}
    assert (await both.call("other", "PUT", "/v1/groups/other", granted)).status == 403
    assert events(both)[before:] == []
    refused = [one.fields["reason"] for one in both.here.memory.observer.calls if one.event == "refused_caller"]
    assert refused == ["group", "group", "kind"]


async def test_a_call_that_is_passed_on_is_recorded_once_with_its_result(both: Guarded) -> None:
    """By the instance that the caller asked, with the caller's name; also failures, and each item of a batch.

    Calls without permission are refused before that, and counted.
    """
    names = [own_id(1, name) for name in ("first", "second")]
    for name in names:
        made = {"group": "shop", "id": name, "messages": [ORDER]}
        assert (await both.call("shop", "POST", "/v1/transactions", made)).status == 201
    before = len(events(both))
    ended = await both.call("operator", "POST", f"/v1/transactions/{names[0]}/end", {"outcome": "commit"}, BY_HAND)
    assert ended.status == 200
    batch = {"prepare": [], "end": [{"id": name, "outcome": "rollback"} for name in names]}
    assert (await both.call("operator", "POST", "/v1/batch", batch, BY_HAND)).status == 200
    await both.call("shop", "POST", f"/v1/transactions/{names[1]}/end", {"outcome": "commit"}, BY_HAND)
    found = events(both)[before:]
    assert [(one.subject, one.actor_kind, one.detail, one.result) for one in found[:1]] == [
        (names[0], "operator", "commit", "done")
    ]
    assert sorted((one.subject, one.actor, one.result) for one in found[1:]) == sorted(
        [(names[0], "first", "already_ended"), (names[1], "first", "done")]
    )
