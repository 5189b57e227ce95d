"""Registers, changes, deletes and lists producer groups, and returns their policies in force."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Final
from zlib import crc32

import msgspec
from yarl import URL

from halfway.coordinator.ports import Authority, CheckCaller, Clock, GroupStore
from halfway.coordinator.records import GroupCounts
from halfway.coordinator.requests import GroupCheck, GroupPage, GroupSpec, GroupView, Moment, ServiceLimits
from halfway.coordinator.shards.shard_table import ShardTable
from halfway.protocol.entries import Pending
from halfway.protocol.errors import (
    ForbiddenError,
    GroupInUseError,
    HalfwayError,
    InvalidRequestError,
    OverloadedError,
    UnknownGroupError,
)
from halfway.protocol.policy import is_of_wrong_clock, next_check_at, next_look_at
from halfway.protocol.principal import Permission, Principal
from halfway.protocol.records import MAX_TOPICS, CheckMode, CheckPolicy, Group, LimitOverrides

HOLD_S: Final = 10.0
"""How long a group that is being deleted accepts no prepares: longer than writing and reading the deletion may take."""
_RESTORE_S: Final = 3.0
"""The time that is left for writing a group again."""
_COUNT_AGAIN_S: Final = 0.5
_RELEASE_HOLD: Final = -1.0
"""In place of `HOLD_S`: accept prepares again."""
_SHOWN_TOPICS: Final = 20
_PAGE_CHARACTERS: Final = 4 * 1024 * 1024
"""The size of topics and URLs on one page, not counting those of its last group."""

CountAll = Callable[[str, float], Awaitable[GroupCounts]]
"""Counts a group's transactions in every shard, and holds back its prepares as `Groups.count` does."""


class Groups:
    """The groups that this instance has read from the log, by name."""

    def __init__(
        self,
        limits: ServiceLimits,
        store: GroupStore,
        shards: ShardTable,
        authority: Authority,
        clock: Clock,
        caller: CheckCaller,
    ) -> None:
        self._limits = limits
        self._store = store
        self._shards = shards
        self._authority = authority
        self._clock = clock
        self._caller = caller
        self._held: dict[str, tuple[float, int]] = {}
        """Groups that are being deleted, here or elsewhere: until when they are held, and their `created_at`."""
        self._policies: dict[str, tuple[Group, CheckPolicy]] = {}

    def get(self, name: str) -> Group:
        """Return a group; raise UnknownGroupError if this instance knows no such group."""
        group = self._store.get(name)
        if group is None:
            raise UnknownGroupError(name)
        return group

    def get_for_prepare(self, name: str) -> Group:
        """Return a group that is registered and not being deleted; raise UnknownGroupError otherwise."""
        group = self.get(name)
        if self._held and self._is_held(group):
            raise UnknownGroupError(name)
        return group

    async def get_permitted(self, name: str, permission: Permission, *, principal: Principal, deadline: float) -> Group:
        """Return a group if the caller has a permission for it. ForbiddenError does not reveal whether it exists."""
        self._authority.require(principal, permission, name)
        return await self.get_latest(name, deadline=deadline)

    async def get_latest(self, name: str, *, deadline: float) -> Group:
        """Return a group as `get` does. If it is unknown, read the log to its current end first."""
        if self._store.get(name) is None:
            await self._store.refresh(deadline=deadline)
        return self.get(name)

    async def refresh(self, *, deadline: float) -> None:
        """Return when this instance has read all groups that were written before this call."""
        await self._store.refresh(deadline=deadline)

    def _is_held(self, group: Group) -> bool:
        until, created_at = self._held.get(group.name, (0.0, 0))
        if until <= asyncio.get_running_loop().time() or created_at != group.created_at:
            self._held.pop(group.name, None)
            return False
        return True

    def all(self) -> Sequence[Group]:
        """Return every group that is known here, by name."""
        return self._store.all()

    def find(self, name: str) -> Group | None:
        return self._store.get(name)

    def is_registered(self, name: str) -> bool:
        return self._store.get(name) is not None

    def policy(self, name: str) -> CheckPolicy:
        group = self._store.get(name)
        if group is None:
            self._policies.pop(name, None)
            return self._limits.default_policy.with_min_interval(self._limits.min_check_interval_s)
        known = self._policies.get(name)
        if known is None or known[0] is not group:
            if known is None:
                self._policies = {one: policy for one, policy in self._policies.items() if self.is_registered(one)}
            known = self._policies[name] = (group, self._policy_in_force(group))
        return known[1]

    def _policy_in_force(self, group: Group) -> CheckPolicy:
        chosen = self._limits.default_policy.with_overrides(group.policy)
        return chosen.with_min_interval(self._limits.min_check_interval_s)

    async def put(self, spec: GroupSpec, *, deadline: float, principal: Principal) -> GroupView:
        """Register a group, replace it, or add to it.

        Raises:
            InvalidRequestError: a policy that could outlive the op topic, or whose times contradict each other; an
                endpoint that the operator does not allow; a new group without topics.
            ForbiddenError: the caller may not change this group, or not its topics or limits.
            OverloadedError: the group is new, and there are already as many groups as allowed.
        """
        self._authority.require(principal, Permission.PUT_GROUP, spec.name)
        views: list[GroupView] = []

        def decide(before: Group | None) -> Group:
            after = self._changed(spec, before, principal)
            views.append(self._view_of(after, created=before is None))
            return after

        await self._store.change(spec.name, decide, deadline=deadline)
        return views[-1]

    def would_be(self, spec: GroupSpec, principal: Principal) -> GroupView:
        """Return the group as `put` would make it now, and change nothing; errors as for `put`."""
        return self._view_of(self._changed(spec, self._store.get(spec.name), principal), created=False)

    def _changed(self, spec: GroupSpec, before: Group | None, principal: Principal) -> Group:
        """Return the new version of a group; errors as for `put`. The caller's current rights apply."""
        self._authority.require(principal, Permission.PUT_GROUP, spec.name)
        asked = spec
        if spec.adds and before is not None:
            spec = _added_to(before, spec)
        if before is None or not set(spec.topics) <= set(before.topics):
            try:
                self._authority.require(principal, Permission.GRANT_TOPICS, spec.name)
            except ForbiddenError as error:
                raise ForbiddenError(f"{error.detail}. Ask an operator to run: {_add_command(asked, before)}") from None
        had = (LimitOverrides(), False) if before is None else (before.limits, before.reject_prepares)
        limits = had[0] if spec.limits is None else spec.limits
        rejects = had[1] if spec.reject_prepares is None else spec.reject_prepares
        if (limits, rejects) != had:
            self._authority.require(principal, Permission.LIMIT_GROUP, spec.name)
        if not spec.topics:
            raise InvalidRequestError(f"group {spec.name!r} is new: name 1 to {MAX_TOPICS} topics", field="topics")
        self._validate(spec)
        if before is None and len(self._store.all()) >= self._limits.max_groups:
            raise OverloadedError(f"{self._limits.max_groups} groups are already registered: delete some")
        now = self._clock.now_ms()
        after = Group(
            name=spec.name,
            mode=spec.mode,
            urls=spec.urls,
            topics=spec.topics,
            policy=spec.policy,
            created_at=now if before is None else before.created_at,
            updated_at=now,
            limits=limits,
            reject_prepares=rejects,
        )
        if spec.adds and before is not None and msgspec.structs.replace(after, updated_at=before.updated_at) == before:
            return before
        return after

    def _validate(self, spec: GroupSpec) -> None:
        for number, url in enumerate(spec.urls):
            refusal = self._caller.refusal(url)
            if refusal is not None:
                raise InvalidRequestError(refusal, field=f"check.urls[{number}]")
        if len(spec.topics) > MAX_TOPICS:
            raise InvalidRequestError(
                f"the group would have {len(spec.topics)} topics, at most {MAX_TOPICS}: PUT those that it needs",
                field="topics",
            )
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

    async def count(
        self, name: str, shards: Collection[int], *, hold_s: float, deadline: float, principal: Principal
    ) -> GroupCounts:
        """Count a group's transactions in shards served here, and refuse its prepares for `hold_s`.

        If `hold_s` is below 0, its prepares are accepted again. If it is 0, nothing changes: another deletion may be in
        progress. A group whose deletion this instance has read by now is counted, too.
        """
        self._authority.require(principal, Permission.DELETE_GROUP, name)
        await self._store.refresh(deadline=deadline)
        group = self._store.get(name)
        if hold_s > 0 and group is not None:
            now = asyncio.get_running_loop().time()
            self._held = {one: hold for one, hold in self._held.items() if hold[0] > now}
            self._held[name] = (now + hold_s, group.created_at)
        elif hold_s < 0:
            self._held.pop(name, None)
        pending, parked = self._shards.counts_of(name, shards)
        return GroupCounts(pending=pending, parked=parked)

    async def delete(self, name: str, count_all: CountAll, *, deadline: float, principal: Principal) -> None:
        """Delete a group that has no pending or parked transaction; raise GroupInUseError otherwise.

        `count_all` counts in every shard, at all owners. A transaction must not be left without its group, so it is
        called a second time, when no owner accepts prepares of the group, and a third time after the deletion: an
        instance that acquired a shard in between knew nothing of it. If that one accepted a prepare, or if not every
        shard can be counted, the group is written again.
        """
        await self.get_permitted(name, Permission.DELETE_GROUP, principal=principal, deadline=deadline)
        _require_unused(name, await count_all(name, 0.0))
        deleted: list[Group | None] = []

        def delete(now: Group | None) -> None:
            deleted.append(now)

        try:
            _require_unused(name, await count_all(name, HOLD_S))
        except HalfwayError:
            await _release(name, count_all)
            raise
        # If the result of the deletion is unknown, the hold expires by itself.
        within = min(deadline, asyncio.get_running_loop().time() + HOLD_S / 2)
        await self._store.change(name, delete, deadline=within)
        try:
            _require_unused(name, await _until_counted(name, count_all, deadline - _RESTORE_S))
        except HalfwayError:
            await self._store.change(name, lambda now: now or deleted[-1], deadline=deadline)
            await _release(name, count_all)
            raise

    async def view(self, name: str, *, deadline: float, principal: Principal) -> GroupView:
        """Return the view of a group; raise UnknownGroupError if it is not registered."""
        self._authority.require(principal, Permission.GET_GROUP, name)
        await self._store.refresh(deadline=deadline)
        return self._view_for(principal, self.get(name))

    async def views(self, *, limit: int, after: str | None, deadline: float, principal: Principal) -> GroupPage:
        """Return up to `limit` groups that the caller may see, by name, after a name; fewer if they are large."""
        self._authority.require(principal, Permission.LIST_GROUPS, principal.group)
        await self._store.refresh(deadline=deadline)
        visible = [
            group
            for group in self._store.all()
            if (after is None or group.name > after) and principal.group in (None, group.name)
        ]
        page: list[Group] = []
        size = 0
        for group in visible[:limit]:
            page.append(group)
            size += sum(map(len, group.topics)) + sum(map(len, group.urls))
            if size > _PAGE_CHARACTERS:
                break
        return GroupPage(
            groups=tuple(self._view_for(principal, group) for group in page),
            next=page[-1].name if len(page) < len(visible) else None,
        )

    def _view_for(self, principal: Principal, group: Group) -> GroupView:
        """Return the view of a group for a caller.

        A caller that may not change the group sees only the hosts of its URLs: the rest of a URL may hold a secret.
        """
        view = self._view_of(group)
        if self._authority.may(principal, Permission.PUT_GROUP, group.name):
            return view
        urls = tuple(f"{URL(url).origin()}/…" for url in group.urls)
        return msgspec.structs.replace(view, check=msgspec.structs.replace(view.check, urls=urls))

    def _view_of(self, group: Group, *, created: bool = False) -> GroupView:
        return GroupView(
            group=group.name,
            check=GroupCheck(mode="pull" if group.mode is CheckMode.PULL else "push", urls=group.urls),
            topics=group.topics,
            policy=self._policy_in_force(group),
            policy_overrides=group.policy,
            limits=group.limits,
            reject_prepares=group.reject_prepares,
            created_at=Moment(group.created_at),
            updated_at=Moment(group.updated_at),
            created=created,
        )


def _added_to(before: Group, spec: GroupSpec) -> GroupSpec:
    """Return the whole group that results when a service adds to it.

    Processes of two releases start in any order, and an operator may have changed the group: what a service does not
    name stays.
    """
    return msgspec.structs.replace(
        spec,
        mode=before.mode if spec.keeps_checks else spec.mode,
        urls=before.urls if spec.keeps_checks else spec.urls,
        topics=tuple(dict.fromkeys((*before.topics, *spec.topics))),
        policy=before.policy.with_overrides(spec.policy),
    )


def _add_command(asked: GroupSpec, before: Group | None) -> str:
    """Return the command that adds what the call named and the group lacks; it takes nothing away.

    A URL with a query is left out, because that may hold a secret: the group's key may set it later.
    """
    has = set(() if before is None else before.topics)
    new = [topic for topic in asked.topics if topic not in has]
    command = ["halfway", "groups", "put", asked.name, "--add"]
    if asked.mode is CheckMode.PULL and not asked.keeps_checks:
        command.append("--pull")
    elif not any(URL(url).raw_query_string for url in asked.urls):
        command += [part for url in asked.urls for part in ("--check-url", url)]
    command += [part for topic in new[:_SHOWN_TOPICS] for part in ("--topic", topic)]
    if asked.policy.chosen():
        command += ["--policy", msgspec.json.encode(asked.policy).decode()]
    more = len(new) - _SHOWN_TOPICS
    rest = f" (and then the same for {more} more topics, which a repeat names)" if more > 0 else ""
    return shlex.join(command) + rest


async def _release(name: str, count_all: CountAll) -> None:
    with suppress(HalfwayError):
        await count_all(name, _RELEASE_HOLD)


async def _until_counted(name: str, count_all: CountAll, until: float) -> GroupCounts:
    """Return the counts of every shard, also if one gets its owner only later; raise the last error after that time."""
    while True:
        try:
            return await count_all(name, 0.0)
        except HalfwayError:
            if asyncio.get_running_loop().time() >= until:
                raise
            await asyncio.sleep(_COUNT_AGAIN_S)


def _require_unused(name: str, counts: GroupCounts) -> None:
    if counts.pending or counts.parked:
        raise GroupInUseError(name, pending=counts.pending, parked=counts.parked)


def jitter(entry: Pending) -> float:
    """Return the jitter of this attempt, in [0, 1). It is the same at every look, so that a due time does not change.

    The first check has no jitter.
    """
    if not entry.attempts:
        return 0.0
    return crc32(f"{entry.id}:{entry.attempts}".encode()) / 2**32


def look_and_check_at(groups: Groups, entry: Pending, now: int) -> tuple[int, int]:
    """Return when the policy must next decide on a transaction, and when its next check is due, in ms since the epoch.

    The first is 0, which means now, if the transaction was written by a wrong clock that has been corrected since.
    """
    policy = groups.policy(entry.group)
    due = next_check_at(policy, entry, jitter=jitter(entry))
    return 0 if is_of_wrong_clock(entry, now) else next_look_at(policy, entry, check_at=due), due


def look_at(groups: Groups, entry: Pending, now: int) -> int:
    """Return when the policy must next decide on a transaction; see `look_and_check_at`."""
    return look_and_check_at(groups, entry, now)[0]


def check_at(groups: Groups, entry: Pending) -> int:
    """Return when the next check of a transaction is due, in ms since the epoch."""
    return next_check_at(groups.policy(entry.group), entry, jitter=jitter(entry))
