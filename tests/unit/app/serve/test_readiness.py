"""Readiness: an instance is ready if it can serve some calls or forward them, and says what is unsafe all the same."""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from halfway.app.metrics import LoopPauses
from halfway.app.serve import backend as readiness
from halfway.app.serve.app import Stage
from halfway.app.serve.backend import WARNINGS, Backend, Readiness
from halfway.coordinator.ports import OwnerHint
from halfway.coordinator.queries.queries import TailFreshness
from halfway.coordinator.shards.shard import Losses
from halfway.kafka.ownership.concurrent_acquisition import ShardTrouble
from halfway.kafka.ownership.membership import MembershipStatus
from tests.support.waiting import until_true

TROUBLE = ShardTrouble(shard=0, since=1.0, tries=3, error="folding: held", remedy="look")
OTHER = OwnerHint(incarnation="b", url="http://other:8080")


def status(
    owned: tuple[int, ...] = (),
    acquiring: tuple[int, ...] = (),
    *,
    joined: bool = True,
    failing: bool = False,
    too_old: str | None = None,
) -> MembershipStatus:
    return MembershipStatus(
        joined=joined,
        incarnation="i",
        owned=owned,
        acquiring=acquiring,
        last_error=too_old,
        troubles=(TROUBLE,) if failing else (),
        too_old=too_old,
    )


class Instance:
    """The readiness of an instance whose membership and neighbours the test sets."""

    def __init__(self, now: MembershipStatus, *others: OwnerHint) -> None:
        self.now = now
        self.others = others
        self.reachable = True
        self.writer_trouble: str | None = None
        self.kafka_age_s = 0.0
        self.readiness = Readiness(
            lambda: self.now, lambda: self.others, self._reaches, lambda: self.writer_trouble, lambda: self.kafka_age_s
        )

    async def _reaches(self, _: OwnerHint) -> bool:
        return self.reachable


@pytest.mark.parametrize(
    "first, reason",
    [
        (status((1, 2)), None),
        (status((1, 2), (0,), failing=True), None),
        (status((1, 2), (0,)), "recovering shards 0"),
        (status((1,), (0, 2), failing=True), "recovering shards 2"),
        (status((), (0,), failing=True), "none of the shards assigned to it could be acquired"),
        (status(), "none is assigned to it"),
        (status(joined=False), "not joined"),
    ],
)
def test_a_single_instance_is_ready_once_it_serves_the_shards_that_it_can(
    first: MembershipStatus, reason: str | None
) -> None:
    """A shard that cannot be acquired takes the others from nobody, once that was tried."""
    found = Instance(first).readiness.reason()
    assert (found is None) == (reason is None), found
    assert reason is None or reason in (found or "")


@pytest.mark.parametrize(
    "later",
    [status((1,), (0, 2)), status((), (0, 1, 2)), status((), (0,), failing=True), status(), status(joined=False)],
    ids=["takes over", "lost its lane", "cannot acquire", "is spare", "left the group"],
)
def test_after_its_first_recovery_an_instance_that_can_serve_or_forward_stays_ready(later: MembershipStatus) -> None:
    """All of it can happen to every instance at once, and a load balancer would have no server then."""
    instance = Instance(status((1,)), OTHER)
    assert instance.readiness.reason() is None
    instance.now = later
    assert instance.readiness.reason() is None
    assert instance.readiness.starting() is None


def test_the_first_recovery_is_waited_for_although_calls_could_be_forwarded() -> None:
    instance = Instance(status((1,), (0,)), OTHER)
    assert "recovering shards 0" in (instance.readiness.starting() or "")
    assert instance.readiness.reason() == instance.readiness.starting()
    instance.now = status((0, 1))
    assert instance.readiness.starting() is None


def test_an_instance_whose_release_cannot_read_the_log_is_not_ready() -> None:
    """Otherwise a rollout of a release that serves nothing would go on and replace those that serve."""
    instance = Instance(status((1,)), OTHER)
    assert instance.readiness.reason() is None
    instance.now = status(too_old="needs a newer release")
    assert "newer release" in (instance.readiness.reason() or "")


def test_an_instance_whose_writer_is_dead_is_not_ready() -> None:
    """It can store no prepare, although Kafka takes those of others."""
    instance = Instance(status((1,)), OTHER)
    instance.writer_trouble = "the thread that writes half has ended"
    assert instance.readiness.reason() == instance.writer_trouble
    assert instance.readiness.starting() is None


async def test_an_instance_that_serves_nothing_and_reaches_nobody_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone is cut off, so others serve; it is ready again when it reaches one."""
    monkeypatch.setattr(readiness, "_WATCH_S", 0.01)
    instance = Instance(status((1,)), OTHER)
    task = asyncio.create_task(instance.readiness.watch())
    try:
        instance.reachable = False
        await asyncio.sleep(0.1)
        assert instance.readiness.reason() is None, "it serves a shard"
        instance.now = status(joined=False)
        await until_true(lambda: "reaches no other instance" in (instance.readiness.reason() or ""))
        instance.reachable = True
        await until_true(lambda: instance.readiness.reason() is None)
    finally:
        task.cancel()


def test_an_instance_that_serves_nothing_and_does_not_learn_who_does_is_not_ready() -> None:
    """It alone is cut off from Kafka: the others move shards and restart, and refuse what it forwards to them."""
    instance = Instance(status((1,)), OTHER)
    assert instance.readiness.reason() is None
    instance.kafka_age_s = 60.0
    assert instance.readiness.reason() is None, "it serves a shard"
    instance.now = status(joined=False)
    assert instance.readiness.reason() == "this instance has read nothing from Kafka for 60 s, and serves no shard"
    instance.kafka_age_s = 1.0
    assert instance.readiness.reason() is None


def backend(keys_age_s: float | None = None, *, late_s: float = 30) -> Backend:
    nothing = cast("Any", None)
    tail = TailFreshness(nothing, nothing, late_s=late_s)
    coordinator = cast("Any", SimpleNamespace(shards=SimpleNamespace(losses=Losses(), unwritten=0)))
    keys = cast("Any", None if keys_age_s is None else SimpleNamespace(age_s=keys_age_s))
    return Backend(coordinator, nothing, nothing, nothing, tail, prefix="_halfway.", keys=keys)


async def test_what_all_instances_can_meet_at_once_is_a_warning() -> None:
    """A changed setting of an internal topic, keys that cannot be read, and a tail that cannot."""
    nothing = cast("Any", None)
    assert backend(1.0).warnings() == []
    unsafe = backend(6.0)
    unsafe.unsafe = ("topic '_halfway.half': cleanup.policy is 'delete'",)
    topics, keys = unsafe.warnings()
    assert (topics.check, topics.detail) == ("topics", unsafe.unsafe[0])
    assert keys.check == "keys"
    assert "read revocations of keys" in keys.detail
    deaf = backend(late_s=-1)
    [tail] = deaf.warnings()
    alone = Backend(unsafe.coordinator, nothing, nothing, nothing, unsafe.tail, prefix="", kafka_age_s=lambda: 40.0)
    assert [(one.check, one.detail) for one in alone.warnings()] == [
        ("kafka", "this instance has read nothing from Kafka for 40 s")
    ]
    assert tail.check == "tail"
    assert "its shards of half" in tail.detail


def test_it_is_shown_for_how_long_a_shard_could_not_be_acquired(monkeypatch: pytest.MonkeyPatch) -> None:
    no = cast("Any", None)
    monkeypatch.setattr("halfway.app.serve.backend.time.time", lambda: 1_000.0)
    for failing, shown in ((False, {}), (True, {"0": 999.0})):
        assert Backend(no, partial(status, failing=failing), no, no, no, prefix="").not_acquired_s() == shown


async def test_each_check_that_can_warn_has_a_sample_before_it_does() -> None:
    stage = Stage(LoopPauses())
    stage.backend = backend(late_s=-1)
    assert stage.warning_counts() == {**dict.fromkeys(WARNINGS, 0), "tail": 1}
