"""`halfway groups refuse`: a group accepts no new transactions, and finishes the old ones."""

import asyncio

from click.testing import CliRunner

from halfway.app.cli.main import halfway as command
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.process import NewCoordinator
from tests.support.coordinator.rest_client import NEVER_S, Connect, message
from tests.support.coordinator.topics import Cluster
from tests.support.ids import new_id

SOON = {"first_check_after_s": 0.5, "check_interval_s": 0.2, "max_interval_s": 0.2}


async def test_prepares_are_rejected_while_ends_and_checks_go_on(
    new_coordinator: NewCoordinator, connect: Connect, endpoint: CheckEndpoint, cluster: Cluster, group: str, topic: str
) -> None:
    """From the switch on, over a restart, and until it is taken back; limits of the group's own survive too."""
    coordinator = new_coordinator().start()
    rest = connect(coordinator)

    async def halfway(*arguments: str) -> str:
        environment = {"HALFWAY_URL": coordinator.url, "HALFWAY_TOKEN": ""}
        ended = await asyncio.to_thread(CliRunner().invoke, command, arguments, env=environment)
        assert ended.exit_code == 0, ended.output
        return ended.stdout

    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=SOON)).expect(201)
    committed = await rest.prepared(group, [message(topic, "committed")], check_after_s=NEVER_S)
    rolled_back = await rest.prepared(group, [message(topic, "rolled back")], check_after_s=NEVER_S)
    checked = await rest.prepared(group, [message(topic, "checked")], as_id=new_id(), check_after_s=3)
    await halfway("groups", "put", group, "--add", "--limits", '{"pending": 2}')

    assert await halfway("groups", "refuse", group) == f"group {group}: new transactions are refused\n"

    (await rest.prepare(group, [message(topic)])).refused(403, "prepares_rejected")
    (await rest.prepare(group, [message(topic, "checked")], as_id=checked)).refused(403, "prepares_rejected")
    coordinator.stop()
    endpoint.answer("commit")
    coordinator.start()
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

    await halfway("groups", "accept", "--all")
    coordinator.stop()
    coordinator.start(HALFWAY_REJECT_PREPARES="true")
    (await rest.prepare(group, [message(topic)])).refused(403, "prepares_rejected")
    coordinator.stop()
    coordinator.start(HALFWAY_REJECT_PREPARES="false")
    many = [{"group": group, "messages": [message(topic)], "check_after_s": NEVER_S}] * 3
    items = (await rest.batch(prepare=many, end=[])).expect(200)["prepare"]
    assert [item["status"] for item in items] == [201, 201, 429]
    for item in items[:2]:
        await rest.rollback(item["body"]["id"])
