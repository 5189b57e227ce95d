"""The events that the audit trail records for manual changes."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from halfway.coordinator.requests import End, GroupSpec
from halfway.protocol.errors import (
    AlreadyEndedError,
    HalfwayError,
    InvalidRequestError,
    KafkaUnavailableError,
    UnknownTransactionError,
)
from halfway.protocol.principal import Principal, PrincipalKind
from halfway.protocol.records import AuditEvent, CheckMode, LimitOverrides, Message, PolicyOverrides
from halfway.protocol.transactions import Cause, Outcome
from tests.support.service.world import World

ANNA = Principal(kind=PrincipalKind.OPERATOR, name="anna", key_id="3fK9")
SHOP = Principal(kind=PrincipalKind.GROUP, name="shop", key_id="7pQ2")


def spec(name: str = "audited", *, url: str = "http://orders:9000/?token=t0ps3cret", **changed: object) -> GroupSpec:
    given: dict[str, object] = {
        "name": name,
        "mode": CheckMode.PUSH,
        "urls": (url,),
        "topics": ("orders",),
        "policy": PolicyOverrides(),
    }
    return GroupSpec(**(given | changed))  # type: ignore[arg-type]


@pytest.fixture
def events(world: World) -> Callable[[], list[AuditEvent]]:
    """Return the events since the fixture was made."""
    before = len(world.memory.audit_trail.events)
    return lambda: world.memory.audit_trail.events[before:]


async def test_registering_changing_and_deleting_a_group_are_recorded(
    world: World, events: Callable[[], list[AuditEvent]]
) -> None:
    """With the caller, the change, and the hosts of the check URLs; the rest of a URL may hold a secret."""
    put, deadline = world.coordinator.put_group, world.deadline()
    await put(spec(), deadline=deadline, principal=ANNA)
    await put(spec(), deadline=deadline, principal=SHOP)
    await put(spec(url="http://other/", topics=("orders", "points")), deadline=deadline, principal=ANNA)
    slower = spec(
        url="http://other/", topics=("orders", "points"), limits=LimitOverrides(pending=9), reject_prepares=True
    )
    await put(slower, deadline=deadline, principal=ANNA)
    await world.coordinator.delete_group("audited", deadline=deadline, principal=ANNA)
    assert [(one.action, one.actor, one.key_id, one.group, one.detail, one.result) for one in events()] == [
        ("register_group", "anna", "3fK9", "audited", "orders:9000", "done"),
        ("change_group", "shop", "7pQ2", "audited", "nothing changed; checks: orders:9000", "done"),
        ("change_group", "anna", "3fK9", "audited", "urls, topics changed; checks: other:80", "done"),
        ("change_group", "anna", "3fK9", "audited", "limits, prepares refused changed; checks: other:80", "done"),
        ("delete_group", "anna", "3fK9", "audited", None, "done"),
    ]
    assert len({one.id for one in events()}) == 5
    assert "t0ps3cret" not in str(events())


async def test_a_policy_is_changed_only_if_the_one_in_force_is(
    world: World, events: Callable[[], list[AuditEvent]]
) -> None:
    """A PUT may write down the defaults, or leave them out again."""
    default = world.coordinator.limits.default_policy.max_checks
    for checks in (None, default, None, default + 1):
        policy = PolicyOverrides() if checks is None else PolicyOverrides(max_checks=checks)
        await world.coordinator.put_group(spec(policy=policy), deadline=world.deadline(), principal=ANNA)
    assert [(one.detail or "").partition(" changed")[0] for one in events()] == [
        "orders:9000",
        "nothing",
        "nothing",
        "policy",
    ]


async def test_what_was_refused_is_recorded_with_the_errors_code(
    world: World, events: Callable[[], list[AuditEvent]]
) -> None:
    with pytest.raises(InvalidRequestError):
        await world.coordinator.put_group(
            spec(policy=PolicyOverrides(first_check_after_s=9, max_age_s=1)), deadline=world.deadline(), principal=SHOP
        )
    with pytest.raises(UnknownTransactionError):
        await world.coordinator.resume("nobody-knows", deadline=world.deadline(), principal=ANNA)
    assert [(one.action, one.subject, one.result) for one in events()] == [
        ("change_group", "audited", "invalid_request"),
        ("resume", "nobody-knows", "unknown_transaction"),
    ]


async def test_an_end_by_hand_is_recorded_if_it_is_not_known_which_keys_are_revoked(
    world: World, events: Callable[[], list[AuditEvent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def require(*_: object) -> None:
        raise KafkaUnavailableError("the keys are too old")

    monkeypatch.setattr(world.coordinator._ending._authority, "require", require)
    request = End(id="o-1", outcome=Outcome.COMMIT, cause=Cause.OPERATOR)
    with pytest.raises(KafkaUnavailableError):
        await world.coordinator.end(request, deadline=world.deadline(), principal=ANNA)
    assert [(one.action, one.subject, one.result) for one in events()] == [("end_by_hand", "o-1", "kafka_unavailable")]


async def test_ends_by_hand_are_recorded_and_a_producers_own_are_not(
    world: World, events: Callable[[], list[AuditEvent]]
) -> None:
    """An end is manual if an operator sends it or if it says so; refused ends and ends of a batch are recorded too."""
    first, second = [await world.prepare(Message(topic="orders", key=b"k", value=b"p4yl0ad")) for _ in range(2)]

    async def end(transaction_id: str, outcome: Outcome, cause: Cause, principal: Principal) -> None:
        request = End(id=transaction_id, outcome=outcome, remark="looked it up", cause=cause)
        await world.coordinator.end(request, deadline=world.deadline(), principal=principal)

    await end(first.id, Outcome.COMMIT, Cause.PRODUCER, SHOP)
    with pytest.raises(AlreadyEndedError):
        await end(first.id, Outcome.ROLLBACK, Cause.OPERATOR, ANNA)
    await end(second.id, Outcome.COMMIT, Cause.PRODUCER, ANNA)
    assert [(one.subject, one.detail, one.remark, one.result) for one in events()] == [
        (first.id, "rollback", "looked it up", "already_ended"),
        (second.id, "commit", "looked it up", "done"),
    ]
    assert {(one.action, one.actor_kind) for one in events()} == {("end_by_hand", "operator")}
    assert "p4yl0ad" not in str(events())


async def test_checks_on_demand_and_resumptions_are_recorded_with_the_group(
    world: World, events: Callable[[], list[AuditEvent]]
) -> None:
    prepared = await world.prepare()
    await world.coordinator.check(prepared.id, deadline=world.deadline(), principal=SHOP)
    await world.coordinator.resume(prepared.id, deadline=world.deadline(), principal=ANNA)
    assert [(one.action, one.actor, one.group) for one in events()] == [
        ("check_now", "shop", "shop"),
        ("resume", "anna", "shop"),
    ]


@pytest.mark.parametrize("principal", [ANNA, SHOP])
async def test_a_manual_end_is_recorded_with_the_group_of_the_transaction(
    world: World, events: Callable[[], list[AuditEvent]], principal: Principal
) -> None:
    """Also a refused one. So a filter on a group finds each manual end of its transactions."""
    prepared = await world.prepare()
    for outcome in (Outcome.COMMIT, Outcome.ROLLBACK):
        request = End(id=prepared.id, outcome=outcome, cause=Cause.OPERATOR)
        with suppress(AlreadyEndedError):
            await world.coordinator.end(request, deadline=world.deadline(), principal=principal)
    assert [(one.action, one.group, one.result) for one in events()] == [
        ("end_by_hand", "shop", "done"),
        ("end_by_hand", "shop", "already_ended"),
    ]


async def test_a_call_of_one_group_is_not_recorded_for_another_group(
    world: World, events: Callable[[], list[AuditEvent]]
) -> None:
    """Otherwise the key of one group could fill the events of another."""
    prepared = await world.prepare()
    other = Principal(kind=PrincipalKind.GROUP, name="points", key_id="9dW4")
    with pytest.raises(HalfwayError):
        await world.coordinator.resume(prepared.id, deadline=world.deadline(), principal=other)
    assert [(one.action, one.group, one.result) for one in events()] == [("resume", None, "unknown_transaction")]


async def test_each_event_is_in_the_log_too(world: World) -> None:
    """As one event with its fields: if the topic cannot be written, only the log has it."""
    with capture_logs() as logs:
        await world.coordinator.put_group(spec(), deadline=world.deadline(), principal=ANNA)
    (logged,) = [one for one in logs if one["event"] == "audit"]
    assert (logged["action"], logged["actor"], logged["key_id"], logged["result"]) == (
        "register_group",
        "anna",
        "3fK9",
        "done",
    )


async def test_a_call_that_nobody_waits_for_any_more_is_recorded_as_interrupted(
    world: World, events: Callable[[], list[AuditEvent]]
) -> None:
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    from halfway.protocol.records import Audited

    work = asyncio.create_task(world.coordinator.auditor.audit(never, ANNA, Audited.REVOKE_KEY, "3fK9"))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert [(one.action, one.result) for one in events()] == [("revoke_key", "interrupted")]


def test_the_root_of_all_errors_has_a_code() -> None:
    """Of an error, its code is recorded, never its text."""
    assert HalfwayError.code


async def test_who_read_what_checks_are_signed_with_is_recorded(
    world: World, events: Callable[[], list[AuditEvent]]
) -> None:
    """A reader of the secret can sign checks of that group until the master secret changes."""
    await world.coordinator.check_secrets("shop", deadline=world.deadline(), principal=SHOP)
    assert [(one.action, one.actor, one.key_id, one.subject, one.group, one.result) for one in events()] == [
        ("read_check_secrets", "shop", "7pQ2", "shop", "shop", "done")
    ]
