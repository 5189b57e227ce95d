"""A caller with short time-outs, and a check for it."""

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from halfway.checks import LOOPBACK_NETWORKS, Destinations, HttpCheckCaller
from halfway.coordinator.ports import CheckReply, CheckRequest
from halfway.embedded.broker import pick_port
from halfway.protocol.records import CheckMode, Group, Message, PolicyOverrides
from tests.support.checkback.servers import response
from tests.support.waiting import GENEROUS_S

GROUP = Group(
    name="orders",
    mode=CheckMode.PUSH,
    urls=(),
    topics=("coupon",),
    policy=PolicyOverrides(),
    created_at=0,
    updated_at=0,
)
QUESTION = CheckRequest(
    check_id="order-1:2",
    id="order-1",
    group="orders",
    prepared_at=1_767_225_600_007,
    attempt=2,
    messages=(Message(topic="coupon", key=b"order-1", value=b"spring"),),
)

LOCAL = Destinations(also_networks=LOOPBACK_NETWORKS)


def local_caller(**options: Any) -> HttpCheckCaller:
    """Create a caller that may call endpoints on this machine."""
    return HttpCheckCaller(
        **{"destinations": LOCAL, "timeout_s": GENEROUS_S, "connect_timeout_s": GENEROUS_S, **options}
    )


COMMIT = response(b'{"outcome": "commit"}')

Ask = Callable[..., Coroutine[None, None, CheckReply]]


@pytest.fixture
async def caller() -> AsyncIterator[HttpCheckCaller]:
    """Return a caller whose time for a call is long enough for a slow machine."""
    async with local_caller() as made:
        yield made


@pytest.fixture
def ask(caller: HttpCheckCaller) -> Ask:
    """Return a function that calls some URLs."""

    async def call(*urls: str, request: CheckRequest = QUESTION) -> CheckReply:
        return await caller.call(GROUP, urls, request)

    return call


@pytest.fixture
def refusing_port() -> int:
    """Return a port without a listener."""
    return pick_port()
