"""The group coordinator: committed offsets, and members among which partitions move one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from halfway.simulated.log import Place

Kind = Literal["assign", "revoke", "lost"]


class Step(NamedTuple):
    """What a member has to do next."""

    kind: Kind
    places: frozenset[Place]


@dataclass(kw_only=True, eq=False)
class Member:
    """A subscribed consumer. `owned` it uses, `target` it is to use once the others have given it up."""

    id: str
    client: str
    topics: tuple[str, ...]
    condition: threading.Condition
    owned: set[Place] = field(default_factory=set)
    target: set[Place] = field(default_factory=set)
    generation: int = -1
    expelled: bool = False
    """Its session has ended, and it does not know it yet."""
    leaving: bool = False


class Group:
    """One consumer group. Call it with the schedule's lock."""

    def __init__(self, places: Callable[[Iterable[str]], list[Place]]) -> None:
        """Start empty; `places` returns the partitions of topics."""
        self._places = places
        self._generation = 0
        self.members: list[Member] = []
        self.offsets: dict[Place, tuple[int, str]] = {}
        """Committed offsets with their metadata."""

    def join(self, member: Member) -> None:
        """Add a member and share the partitions anew."""
        self.members.append(member)
        self.rebalance()

    def leave(self, member: Member) -> None:
        """Remove a member; what it owned is free."""
        if member in self.members:
            self.members.remove(member)
        member.owned.clear()
        self.rebalance()

    def expel(self, member: Member) -> None:
        """End a member's session: others get its partitions before it knows."""
        self.members.remove(member)
        member.expelled = True
        member.condition.notify_all()
        self.rebalance()

    def rebalance(self) -> None:
        """Share the partitions: each member keeps what it has up to its part."""
        self._generation += 1
        if not self.members:
            return
        members = sorted(self.members, key=lambda one: -len(one.owned))  # stable: the first come first
        free = self._places({topic for member in members for topic in member.topics})
        part, more = divmod(len(free), len(members))
        for place, member in enumerate(members):
            kept = [owned for owned in sorted(member.owned) if owned in free][: part + (place < more)]
            member.target = set(kept)
            free = [one for one in free if one not in member.target]
        for place, member in enumerate(members):
            missing = part + (place < more) - len(member.target)
            member.target.update(free[:missing])
            free = free[missing:]
        self._notify()

    def step(self, member: Member) -> Step | None:
        """Return what a member has to do now; None if nothing."""
        if member.expelled or member.leaving:
            return Step("lost" if member.expelled else "revoke", frozenset(member.owned))
        surplus = member.owned - member.target
        if surplus:
            return Step("revoke", frozenset(surplus))
        taken = set[Place]().union(*(other.owned for other in self.members if other is not member))
        free = member.target - member.owned - taken
        if free or member.generation != self._generation:
            member.generation = self._generation
            member.owned |= free
            return Step("assign", frozenset(free))
        return None

    def released(self, member: Member, places: Iterable[Place]) -> None:
        """Record that a member uses partitions no more."""
        member.owned.difference_update(places)
        self._notify()

    def forget(self, topic: str) -> None:
        """Forget the offsets of a topic that is deleted."""
        self.offsets = {place: entry for place, entry in self.offsets.items() if place[0] != topic}
        self.rebalance()

    def _notify(self) -> None:
        for member in self.members:
            member.condition.notify_all()
