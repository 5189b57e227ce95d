"""Producer groups: registered, changed, removed; and the policy in force for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfway.domain.errors import GroupInUseError, InvalidRequestError, UnknownGroupError
from halfway.domain.records import Group
from halfway.service.requests import GroupSpec, GroupView

if TYPE_CHECKING:
    from halfway.domain.policy import CheckPolicy
    from halfway.service.ports import Authority, CheckCaller, Clock, GroupStore
    from halfway.service.requests import ServiceLimits
    from halfway.service.shards import ShardTable


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
        self._leaving: set[str] = set()

    def require(self, name: str, *, credential: str | None, action: str) -> Group:
        """Return a group that the caller may act for; UnknownGroupError or ForbiddenError otherwise."""
        group = self._store.get(name)
        self._authority.require(credential, group, action=action)
        if group is None or (action == "prepare" and name in self._leaving):
            raise UnknownGroupError(name)
        return group

    def allow(self, name: str, *, credential: str | None, action: str) -> None:
        """Raise ForbiddenError where the caller may not act for a group, registered or not."""
        self._authority.require(credential, self._store.get(name), action=action)

    def find(self, name: str) -> Group | None:
        """Return a group, None where it is not registered."""
        return self._store.get(name)

    def policy(self, name: str) -> CheckPolicy:
        """Return the policy in force for a group."""
        group = self._store.get(name)
        default = self._limits.default_policy
        return default if group is None else default.overridden(group.policy)

    async def put(self, spec: GroupSpec, *, deadline: float, credential: str | None) -> GroupView:
        """Register a group or change it.

        Raises:
            InvalidRequestError: a policy that could outlive the op topic, or whose times contradict each other; an
                endpoint that the operator does not allow.

        """
        before = self._store.get(spec.name)
        self._authority.require(credential, before, action="put_group")
        self._judge(spec)
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

    async def delete(self, name: str, *, deadline: float, credential: str | None) -> None:
        """Remove a group that has no pending or parked transaction; GroupInUseError otherwise."""
        self.require(name, credential=credential, action="delete_group")
        pending, parked = self._shards.all_counts_of(name)
        if pending or parked:
            raise GroupInUseError(name, pending=pending, parked=parked)
        self._leaving.add(name)
        try:
            await self._store.delete(name, deadline=deadline)
        finally:
            self._leaving.discard(name)

    def view(self, name: str, *, credential: str | None) -> GroupView:
        """Show a group; UnknownGroupError where it is not registered."""
        return self._shown(self.require(name, credential=credential, action="get_group"))

    def views(self, *, credential: str | None) -> list[GroupView]:
        """Show every group, by name."""
        self._authority.require(credential, None, action="list_groups")
        return [self._shown(group) for group in sorted(self._store.all(), key=lambda group: group.name)]

    def _shown(self, group: Group, *, created: bool = False) -> GroupView:
        return GroupView(
            name=group.name,
            mode=group.mode,
            urls=group.urls,
            topics=group.topics,
            policy=self._limits.default_policy.overridden(group.policy),
            created_at=group.created_at,
            updated_at=group.updated_at,
            created=created,
        )
