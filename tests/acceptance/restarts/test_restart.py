"""Stopping and killing the coordinator under load loses nothing and does nothing twice."""

import asyncio
from collections import Counter

from tests.support.coordinator.callers import Callers
from tests.support.coordinator.process import NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, message
from tests.support.coordinator.topics import Cluster, InternalTopics

ROUNDS = ("kill", "stop", "kill", "kill")


async def test_restarts_under_load_lose_nothing_and_do_nothing_twice(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, group: str, topic: str
) -> None:
    """Repeated kill -9 and orderly stops under load.

    Every acknowledged end stands, its messages exactly once; a caller without an answer repeats its call and gets one;
    and what nobody ends stays pending.
    """
    coordinator = new_coordinator().start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    pending = [await rest.prepared(group, [message(topic)]) for _ in range(20)]
    async with Callers(rest, group, [topic], callers=12) as callers:
        for how in ROUNDS:
            await callers.committed(60)
            if how == "kill":
                coordinator.kill()
            else:
                coordinator.terminate()
                assert await coordinator.exited() == 0
            coordinator.launch()
            await asyncio.to_thread(coordinator.wait_until_ready)
        await callers.committed(60)
        await callers.finish()
    history = callers.history
    await history.audit(cluster, [topic])
    wanted = dict.fromkeys(history.committed, "committed") | dict.fromkeys(history.rolled_back, "rolled_back")
    shown = await asyncio.gather(*map(rest.show, [*wanted, *pending]))
    assert {one["id"]: one["state"] for one in shown} == wanted | dict.fromkeys(pending, "prepared")
    ops = await InternalTopics(cluster, coordinator.prefix).ops()
    assert Counter((op.id, op.kind.value.lower()) for op in ops if op.kind.final) == Counter(wanted.items())
    ever = (await rest.call("GET", "/statistics")).expect(200)["totals"]
    assert ever["committed"] == {"producer": len(history.committed)}
    assert ever["rolled_back"] == {"producer": len(history.rolled_back)}


async def test_what_was_pending_parked_and_registered_is_so_after_a_crash(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, group: str, topic: str
) -> None:
    """With payload, remark, reason and policy; and a pending one can be ended as before."""
    coordinator = new_coordinator({"HALFWAY_LEASE_S": "0.2"}).start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    pending = await rest.prepared(group, [message(topic, "pending", key="k", partition=1)])
    (await rest.end(pending, "unknown", remark="database was slow")).expect(200)
    hasty = {"first_check_after_s": 0.1, "check_interval_s": 0.1, "max_interval_s": 0.1, "max_checks": 1}
    other = f"{group}-hasty"
    (await rest.put_group(other, topics=[topic], policy=hasty)).expect(201)
    parked = await rest.prepared(other, [message(topic, "parked")])
    assert await rest.lease(other, wait_s=30)
    await rest.until(parked, "parked")
    known = {name: (await rest.call("GET", f"/groups/{name}")).expect(200) for name in (group, other)}
    before = {name: await rest.show(name) for name in (pending, parked)}

    for how in ("kill", "stop"):
        if how == "kill":
            coordinator.kill()
        else:
            assert coordinator.stop() == 0
        coordinator.start()

        assert {name: (await rest.call("GET", f"/groups/{name}")).expect(200) for name in known} == known
        assert {name: await rest.show(name) for name in before} == before

    assert (await rest.commit(pending))["changed"] is True
    assert (await rest.commit(parked))["changed"] is True
    assert {record.value for record in await cluster.read(topic)} == {b"pending", b"parked"}
