"""Producer groups: registered, changed, removed; and the policy in force for each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
from yarl import URL

from halfway.domain.errors import (
    ForbiddenError,
    GroupInUseError,
    HalfwayError,
    InvalidRequestError,
    OverloadedError,
    UnknownGroupError,
)
from halfway.domain.principal import Permission, Principal
from halfway.domain.records import Group
from halfway.service.peer_calls import GroupCounts
from halfway.service.requests import GroupPage, GroupSpec, GroupView

if TYPE_CHECKING:
    from halfway.domain.policy import CheckPolicy
    from halfway.service.check_ports import CheckCaller
    from halfway.service.ports import Authority, Clock, GroupStore
    from halfway.service.requests import ServiceLimits
    from halfway.service.shards.shard_table import ShardTable

HOLD_S: Final = 10.0
"""How long a group that is being deleted takes no prepares: longer than to write and to read the deletion may take."""
_TAKE_AGAIN: Final = -1.0
"""In place of `HOLD_S`: take its prepares again."""
_SHOWN_TOPICS: Final = 20
_PAGE_CHARACTERS: Final = 4 * 1024 * 1024
"""Of topics and URLs on one page, beyond those of its last group."""

CountAll = Callable[[str, float], Awaitable[GroupCounts]]
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

    def registered(self, name: str) -> Group:
        """Return a group; UnknownGroupError if it is not registered as far as this instance knows."""
        group = self._store.get(name)
        if group is None:
            raise UnknownGroupError(name)
        return group

    def taking_prepares(self, name: str) -> Group:
        """Return a group that is registered and not being deleted; UnknownGroupError otherwise."""
        group = self.registered(name)
        if self._held and self._is_held(group):
            raise UnknownGroupError(name)
        return group

    async def allowed(self, name: str, permission: Permission, *, principal: Principal, deadline: float) -> Group:
        """Return a group that the caller may do this to; ForbiddenError does not tell whether it is registered."""
        self._authority.require(principal, permission, name)
        return await self.at_the_end_of_the_log(name, deadline=deadline)

    async def at_the_end_of_the_log(self, name: str, *, deadline: float) -> Group:
        """Return a group as `registered` does; one that is not known is looked for as far as the log goes now."""
        if self._store.get(name) is None:
            await self._store.refresh(deadline=deadline)
        return self.registered(name)

    async def refresh(self, *, deadline: float) -> None:
        """Return once this instance knows the groups that were written before this call."""
        await self._store.refresh(deadline=deadline)

    def _is_held(self, group: Group) -> bool:
        until, created_at = self._held.get(group.name, (0.0, 0))
        if until <= asyncio.get_running_loop().time() or created_at != group.created_at:
            self._held.pop(group.name, None)
            return False
        return True

    def all(self) -> Sequence[Group]:
        """Return every group, by name, as far as it is known here."""
        return self._store.all()

    def find(self, name: str) -> Group | None:
        """Return a group, None if it is not registered."""
        return self._store.get(name)

    def policy(self, name: str) -> CheckPolicy:
        """Return the policy in force for a group."""
        group = self._store.get(name)
        if group is None:
            self._policies.pop(name, None)
            return self._limits.default_policy.with_min_interval(self._limits.min_check_interval_s)
        known = self._policies.get(name)
        if known is None or known[0] is not group:
            known = self._policies[name] = (group, self._in_force(group))
        return known[1]

    def _in_force(self, group: Group) -> CheckPolicy:
        chosen = self._limits.default_policy.with_overrides(group.policy)
        return chosen.with_min_interval(self._limits.min_check_interval_s)

    async def put(self, spec: GroupSpec, *, deadline: float, principal: Principal) -> GroupView:
        """Register a group or change it.

        Raises:
            InvalidRequestError: a policy that could outlive the op topic, or whose times contradict each other; an
                endpoint that the operator does not allow.
            ForbiddenError: the caller may not change this group, or not its topics.
            OverloadedError: it is new, and there are as many as may be.

        """
        self._authority.require(principal, Permission.PUT_GROUP, spec.name)
        decided: list[GroupView] = []

        def decide(before: Group | None) -> Group:
            after = self._decided(spec, before, principal)
            decided.append(self._shown(after, created=before is None))
            return after

        await self._store.change(spec.name, decide, deadline=deadline)
        return decided[-1]

    def _decided(self, spec: GroupSpec, before: Group | None, principal: Principal) -> Group:
        """Return a group as it is to be; errors as `put`. The caller's rights are those of this moment."""
        self._authority.require(principal, Permission.PUT_GROUP, spec.name)
        if before is None or not set(spec.topics) <= set(before.topics):
            try:
                self._authority.require(principal, Permission.GRANT_TOPICS, spec.name)
            except ForbiddenError as error:
                raise ForbiddenError(f"{error.detail}. Have an operator run: {_registering(spec)}") from None
        self._judge(spec)
        if before is None and len(self._store.all()) >= self._limits.max_groups:
            raise OverloadedError(
                f"{self._limits.max_groups} groups are registered already: delete some, or raise HALFWAY_MAX_GROUPS"
            )
        now = self._clock.now_ms()
        return Group(
            name=spec.name,
            mode=spec.mode,
            urls=spec.urls,
            topics=spec.topics,
            policy=spec.policy,
            created_at=now if before is None else before.created_at,
            updated_at=now,
        )

    def _judge(self, spec: GroupSpec) -> None:
        for number, url in enumerate(spec.urls):
            refusal = self._caller.refusal(url)
            if refusal is not None:
                raise InvalidRequestError(refusal, field=f"check.urls[{number}]")
        policy = self._limits.default_policy.with_overrides(spec.policy)
        limit = self._limits.max_age_limit_s
        if policy.max_age_s > limit:
            raise InvalidRequestError(
                f"max_age_s {policy.max_age_s:g} could outlive the op topic's retention: at most {limit:g}",
                field="policy.max_age_s",
            )
        contradiction = policy.contradiction()
        if contradiction is not None:
            field, detail = contradiction
            raise InvalidRequestError(detail, field=f"policy.{field}")

    def count(self, name: str, shards: Collection[int], *, hold_s: float) -> GroupCounts:
        """Count a group's transactions in shards served here, and take no prepare of it for a time.

        Below 0 its prepares are taken again. At 0 that stays as it is: another deletion may be under way.
        """
        group = self._store.get(name)
        if hold_s > 0 and group is not None:
            self._held[name] = (asyncio.get_running_loop().time() + hold_s, group.created_at)
        elif hold_s < 0:
            self._held.pop(name, None)
        pending, parked = self._shards.counts_of(name, shards)
        return GroupCounts(pending=pending, parked=parked)

    async def delete(self, name: str, count_all: CountAll, *, deadline: float, principal: Principal) -> None:
        """Remove a group that has no pending or parked transaction; GroupInUseError otherwise.

        `count_all` counts in every shard, of all owners. It is called again while no owner takes prepares of it:
        a transaction that is prepared in between must not be left without its group.
        """
        await self.allowed(name, Permission.DELETE_GROUP, principal=principal, deadline=deadline)
        _demand_unused(name, await count_all(name, 0.0))
        try:
            _demand_unused(name, await count_all(name, HOLD_S))
        except HalfwayError:
            with suppress(HalfwayError):
                await count_all(name, _TAKE_AGAIN)
            raise
        # If it is not known whether the group was deleted, the hold expires by itself.
        within = min(deadline, asyncio.get_running_loop().time() + HOLD_S / 2)
        await self._store.change(name, lambda _: None, deadline=within)

    async def view(self, name: str, *, deadline: float, principal: Principal) -> GroupView:
        """Show a group; UnknownGroupError if it is not registered."""
        self._authority.require(principal, Permission.GET_GROUP, name)
        await self._store.refresh(deadline=deadline)
        return self._shown_to(principal, self.registered(name))

    async def views(self, *, limit: int, after: str | None, deadline: float, principal: Principal) -> GroupPage:
        """Show up to `limit` groups that the caller may see, by name, those after a name; fewer if they are large."""
        self._authority.require(principal, Permission.LIST_GROUPS, principal.group)
        await self._store.refresh(deadline=deadline)
        found = [
            group
            for group in self._store.all()
            if (after is None or group.name > after) and principal.group in (None, group.name)
        ]
        shown: list[Group] = []
        size = 0
        for group in found[:limit]:
            shown.append(group)
            size += sum(map(len, group.topics)) + sum(map(len, group.urls))
            if size > _PAGE_CHARACTERS:
                break
        return GroupPage(
            groups=tuple(self._shown_to(principal, group) for group in shown),
            next=shown[-1].name if len(shown) < len(found) else None,
        )

    def _shown_to(self, principal: Principal, group: Group) -> GroupView:
        """Show a group; who may not change its endpoints sees only their hosts: the rest of a URL may hold a secret."""
        shown = self._shown(group)
        if self._authority.may(principal, Permission.PUT_GROUP, group.name):
            return shown
        return msgspec.structs.replace(shown, urls=tuple(f"{URL(url).origin()}/…" for url in group.urls))

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


def _registering(spec: GroupSpec) -> str:
    """Return the command with which an operator registers a group, without its URLs: they may hold a secret."""
    checks = "--check-url <its check URL>" if spec.urls else "--pull"
    topics = " ".join(f"--topic {topic}" for topic in spec.topics[:_SHOWN_TOPICS])
    return f"halfway groups put {spec.name} {checks} {topics}{' …' if len(spec.topics) > _SHOWN_TOPICS else ''}"


def _demand_unused(name: str, found: GroupCounts) -> None:
    if found.pending or found.parked:
        raise GroupInUseError(name, pending=found.pending, parked=found.parked)
