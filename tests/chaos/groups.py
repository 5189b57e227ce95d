"""The groups of a run: how each gets its checks, its policy, its key and its check secrets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import Final

from tests.chaos.answering import CheckEndpoints
from tests.chaos.caller import Caller
from tests.chaos.coordinators import Instance
from tests.chaos.producers import DROPPING, GROUPS, LEAVING, PARKING, PULLED, PUSHED, TOPICS
from tests.support.waiting import eventually

_POLICY: Final = {"first_check_after_s": 2, "check_interval_s": 1, "max_interval_s": 4, "max_checks": 40}
_SHORT: Final = {"first_check_after_s": 1.5, "check_interval_s": 1, "max_interval_s": 1, "max_checks": 2}
_BRIEF: Final = _SHORT | {"max_age_s": 8, "on_exhausted": "rollback"}
"""Usually the number of checks is reached, and after an outage the age."""


async def register(caller: Caller, url: str) -> None:
    """Register every group as an operator; groups with checks over HTTP get this URL."""
    pushed = {"urls": [url]}
    for group, check, policy in (
        (PUSHED, pushed, _POLICY),
        (PULLED, {"mode": "pull"}, _POLICY),
        (PARKING, pushed, _SHORT | {"on_exhausted": "park"}),
        (DROPPING, pushed, _BRIEF),
        (LEAVING, {"mode": "pull"}, _BRIEF),
    ):
        body = {"check": check, "topics": list(TOPICS), "policy": policy}
        answer = await caller.persist("PUT", f"/groups/{group}", body)
        assert answer.status in (HTTPStatus.OK, HTTPStatus.CREATED), answer


async def use_keys(caller: Caller, endpoints: CheckEndpoints, instances: Sequence[Instance]) -> None:
    """Create a key for each group, which its callers use from now on; its check endpoints verify signatures."""
    for group in GROUPS:
        created = await caller.persist("POST", "/keys", {"kind": "group", "name": group})
        assert created.status == HTTPStatus.CREATED, created.status
        key = {"Authorization": f"Bearer {created.body['key']}"}
        for instance in instances:  # each coordinator knows the key within a second
            ask = partial(caller.ask, instance, f"/groups/{group}", shown=key)
            await eventually(ask, lambda answer: answer.status == HTTPStatus.OK)
        caller.keys[group] = created.body["key"]
        shown = await caller.persist("GET", f"/groups/{group}/check-secrets", group=group)
        endpoints.trust(group, shown.body["secrets"])
