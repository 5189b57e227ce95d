"""HALFWAY_REJECT_PREPARES: a draining coordinator accepts no new transactions and finishes the old ones."""

from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.process import NewCoordinator
from tests.support.coordinator.rest_client import NEVER_S, Connect, message
from tests.support.coordinator.topics import Cluster
from tests.support.ids import new_id

SOON = {"first_check_after_s": 0.5, "check_interval_s": 0.2, "max_interval_s": 0.2}


async def test_prepares_are_rejected_while_ends_and_checks_go_on(
    new_coordinator: NewCoordinator,
    connect: Connect,
    endpoint: CheckEndpoint,
    cluster: Cluster,
    group: str,
    topic: str,
) -> None:
    coordinator = new_coordinator().start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=SOON)).expect(201)
    committed = await rest.prepared(group, [message(topic, "committed")], check_after_s=NEVER_S)
    rolled_back = await rest.prepared(group, [message(topic, "rolled back")], check_after_s=NEVER_S)
    checked = await rest.prepared(group, [message(topic, "checked")], as_id=new_id())
    coordinator.stop()
    endpoint.answer("commit")

    coordinator.start(HALFWAY_REJECT_PREPARES="true")

    (await rest.prepare(group, [message(topic)])).refused(403, "prepares_rejected")
    (await rest.prepare(group, [message(topic, "checked")], as_id=checked)).refused(403, "prepares_rejected")
    batch = await rest.batch(
        prepare=[{"group": group, "messages": [message(topic)]}], end=[{"id": committed, "outcome": "commit"}]
    )
    items = batch.expect(200)
    assert (items["prepare"][0]["status"], items["prepare"][0]["problem"]["error_code"]) == (403, "prepares_rejected")
    assert items["end"][0]["status"] == 200
    assert (await rest.rollback(rolled_back))["changed"] is True
    shown = await rest.until(checked, "committed")
    assert shown["cause"] == "check"
    assert (await rest.page(group=group, state="prepared"))["transactions"] == []
    assert {record.value for record in await cluster.read(topic)} == {b"committed", b"checked"}

    coordinator.stop()
    coordinator.start(HALFWAY_REJECT_PREPARES="false")
    await rest.rollback(await rest.prepared(group, [message(topic)]))
