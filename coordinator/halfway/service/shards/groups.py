"""Producer groups: registered, changed, removed; and the policy in force for each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from halfway.domain.errors import (
    GroupInUseError,
    HalfwayError,
    InvalidRequestError,
    OverloadedError,
    UnknownGroupError,
)
from halfway.domain.records import Group
from halfway.service.peer_calls import Counted
from halfway.service.requests import GroupPage, GroupSpec, GroupView

if TYPE_CHECKING:
    from halfway.domain.policy import CheckPolicy
    from halfway.service.ports import Authority, CheckCaller, Clock, GroupStore
    from halfway.service.requests import ServiceLimits
    from halfway.service.shards.shard_table import ShardTable

HOLD_S: Final = 10.0
"""How long a group that is being deleted takes no prepares: longer than to write and to read the deletion may take."""
_TAKE_AGAIN: Final = -1.0
"""In place of `HOLD_S`: take its prepares again."""
_PAGE_CHARACTERS: Final = 4 * 1024 * 1024
"""Of topics and URLs on one page, beyond those of its last group."""

CountAll = Callable[[str, float], Awaitable[Counted]]
"""Counts a group's transactions in every shard, and holds its prepares back as `Groups.count` does."""


class Groups:
    """What is known of groups, from the log; a group is asked for by name."""

    def __init__(
        self,
        limits: ServiceLimits,
        store: GroupStore,
        shards: ShardTable,
        authority: Authority,
        clock: Clock,
        caller: CheckCaller,
    ) -> None:
        """Keep the parts; nothing is started."""
        self._limits = limits
        self._store = store
        self._shards = shards
        self._authority = authority
        self._clock = clock
        self._caller = caller
        self._held: dict[str, tuple[float, int]] = {}
        """Groups that are being deleted, here or elsewhere: until when they take no prepares, and when made."""
        self._policies: dict[str, tuple[Group, CheckPolicy]] = {}

    def require(self, name: str, *, credential: str | None, action: str) -> Group:
        """Return a group that the caller may act for; UnknownGroupError or ForbiddenError otherwise."""
        group = self._store.get(name)
        self._authority.require(credential, group, action=action)
        if group is None or (self._held and action == "prepare" and self._is_held(group)):
            raise UnknownGroupError(name)
        return group

    async def required(self, name: str, *, credential: str | None, action: str, deadline: float) -> Group:
        """Return a group as `require` does; one that is not known is looked for as far as the log goes now."""
        if self._store.get(name) is None:
            await self._store.refresh(deadline=deadline)
        return self.require(name, credential=credential, action=action)

    async def refresh(self, *, deadline: float) -> None:
        """Return once this instance knows the groups that were written before this call."""
        await self._store.refresh(deadline=deadline)

    def _is_held(self, group: Group) -> bool:
        until, created_at = self._held.get(group.name, (0.0, 0))
        if until <= asyncio.get_running_loop().time() or created_at != group.created_at:
            self._held.pop(group.name, None)
            return False
        return True

    def allow(self, name: str, *, credential: str | None, action: str) -> None:
        """Raise ForbiddenError if the caller may not act for a group, registered or not."""
        self._authority.require(credential, self._store.get(name), action=action)

    def find(self, name: str) -> Group | None:
        """Return a group, None if it is not registered."""
        return self._store.get(name)

    def policy(self, name: str) -> CheckPolicy:
        """Return the policy in force for a group."""
        group = self._store.get(name)
        if group is None:
            self._policies.pop(name, None)
            return self._limits.default_policy.no_faster_than(self._limits.min_check_interval_s)
        known = self._policies.get(name)
        if known is None or known[0] is not group:
            known = self._policies[name] = (group, self._in_force(group))
        return known[1]

    def _in_force(self, group: Group) -> CheckPolicy:
        chosen = self._limits.default_policy.overridden(group.policy)
        return chosen.no_faster_than(self._limits.min_check_interval_s)

    async def put(self, spec: GroupSpec, *, deadline: float, credential: str | None) -> GroupView:
        """Register a group or change it.

        Raises:
            InvalidRequestError: a policy that could outlive the op topic, or whose times contradict each other; an
                endpoint that the operator does not allow.
            OverloadedError: it is new, and there are as many as may be.

        """
        await self._store.refresh(deadline=deadline)
        before = self._store.get(spec.name)
        self._authority.require(credential, before, action="put_group")
        self._judge(spec)
        if before is None and len(self._store.all()) >= self._limits.max_groups:
            raise OverloadedError(
                f"{self._limits.max_groups} groups are registered already: delete some, or raise HALFWAY_MAX_GROUPS"
            )
        now = self._clock.now_ms()
        group = Group(
            name=spec.name,
            mode=spec.mode,
            urls=spec.urls,
            topics=spec.topics,
            policy=spec.policy,
            created_at=now if before is None else before.created_at,
            updated_at=now,
            key_hashes=() if before is None else before.key_hashes,
        )
        await self._store.put(group, deadline=deadline)
        return self._shown(group, created=before is None)

    def _judge(self, spec: GroupSpec) -> None:
        for number, url in enumerate(spec.urls):
            refusal = self._caller.refusal(url)
            if refusal is not None:
                raise InvalidRequestError(refusal, field=f"check.urls[{number}]")
        policy = self._limits.default_policy.overridden(spec.policy)
        limit = self._limits.max_age_limit_s
        if policy.max_age_s > limit:
            raise InvalidRequestError(
                f"max_age_s {policy.max_age_s:g} could outlive the op topic's retention: at most {limit:g}",
                field="policy.max_age_s",
            )
        if policy.max_interval_s < policy.check_interval_s:
            raise InvalidRequestError(
                f"max_interval_s {policy.max_interval_s:g} is below check_interval_s {policy.check_interval_s:g}: "
                "raise the one or lower the other",
                field="policy.max_interval_s",
            )
        if policy.first_check_after_s >= policy.max_age_s:
            raise InvalidRequestError(
                f"first_check_after_s {policy.first_check_after_s:g} is not below max_age_s {policy.max_age_s:g}: "
                "no check would ever be sent",
                field="policy.first_check_after_s",
            )

    def count(self, name: str, shards: Collection[int], *, hold_s: float) -> Counted:
        """Count a group's transactions in shards served here, and take no prepare of it for a time.

        Below 0 its prepares are taken again. At 0 that stays as it is: another deletion may be under way.
        """
        group = self._store.get(name)
        if hold_s > 0 and group is not None:
            self._held[name] = (asyncio.get_running_loop().time() + hold_s, group.created_at)
        elif hold_s < 0:
            self._held.pop(name, None)
        pending, parked = self._shards.counts_of(name, shards)
        return Counted(pending=pending, parked=parked)

    async def delete(self, name: str, count_all: CountAll, *, deadline: float, credential: str | None) -> None:
        """Remove a group that has no pending or parked transaction; GroupInUseError otherwise.

        `count_all` counts in every shard, of all owners. It is called again while no owner takes prepares of it:
        a transaction that is prepared in between must not be left without its group.
        """
        await self.required(name, credential=credential, action="delete_group", deadline=deadline)
        _demand_unused(name, await count_all(name, 0.0))
        try:
            _demand_unused(name, await count_all(name, HOLD_S))
        except HalfwayError:
            with suppress(HalfwayError):
                await count_all(name, _TAKE_AGAIN)
            raise
        # If it is not known whether the group was deleted, the hold expires by itself.
        await self._store.delete(name, deadline=min(deadline, asyncio.get_running_loop().time() + HOLD_S / 2))

    async def view(self, name: str, *, deadline: float, credential: str | None) -> GroupView:
        """Show a group; UnknownGroupError if it is not registered."""
        await self._store.refresh(deadline=deadline)
        return self._shown(self.require(name, credential=credential, action="get_group"))

    async def views(self, *, limit: int, after: str | None, deadline: float, credential: str | None) -> GroupPage:
        """Show up to `limit` groups by name, those after a name; fewer if they are large."""
        self._authority.require(credential, None, action="list_groups")
        await self._store.refresh(deadline=deadline)
        found = [group for group in self._store.all() if after is None or group.name > after]
        shown: list[Group] = []
        size = 0
        for group in found[:limit]:
            shown.append(group)
            size += sum(map(len, group.topics)) + sum(map(len, group.urls))
            if size > _PAGE_CHARACTERS:
                break
        return GroupPage(
            groups=tuple(self._shown(group) for group in shown),
            next=shown[-1].name if len(shown) < len(found) else None,
        )

    def _shown(self, group: Group, *, created: bool = False) -> GroupView:
        return GroupView(
            name=group.name,
            mode=group.mode,
            urls=group.urls,
            topics=group.topics,
            policy=self._in_force(group),
            created_at=group.created_at,
            updated_at=group.updated_at,
            created=created,
        )


def _demand_unused(name: str, found: Counted) -> None:
    if found.pending or found.parked:
        raise GroupInUseError(name, pending=found.pending, parked=found.parked)
