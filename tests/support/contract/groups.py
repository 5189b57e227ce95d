"""Groups that a test has stand in the log, whatever stood there."""

from halfway.coordinator.ports import GroupStore
from halfway.protocol.records import Group


async def put(groups: GroupStore, group: Group, *, deadline: float) -> None:
    await groups.change(group.name, lambda _: group, deadline=deadline)


async def remove(groups: GroupStore, name: str, *, deadline: float) -> None:
    await groups.change(name, lambda _: None, deadline=deadline)
