"""A service of several groups on one URL, beside a coordinator with access control."""

from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from halfway.client import Halfway, Message, join_aiohttp
from halfway.client.barrier import Barrier, sqlite_transactions
from halfway.embedded.broker import pick_port
from halfway.protocol.keys import RANDOM_BYTES, key_text
from halfway.protocol.principal import PrincipalKind
from tests.support.coordinator.process import NewCoordinator
from tests.support.waiting import eventually

OPERATOR = key_text(PrincipalKind.OPERATOR, bytes(range(RANDOM_BYTES)))
SETTINGS = {
    "HALFWAY_MASTER_SECRET": "the master secret of this test, which is long enough",
    "HALFWAY_OPERATOR_KEY": OPERATOR,
    "HALFWAY_OPEN_ACCESS": "false",
}
SOON = {"first_check_after_s": 0.2, "check_interval_s": 0.2, "max_interval_s": 0.4}


async def test_signed_checks_are_answered_and_forged_ones_refused(
    new_coordinator: NewCoordinator, topic: str, tmp_path: Path
) -> None:
    """The service has no verifier: the keys of its clients are enough."""
    coordinator = new_coordinator(SETTINGS).start()
    barrier = Barrier("sqlite", sqlite_transactions(tmp_path / "shop.sqlite"))
    barrier.create()
    port = pick_port()
    url = f"http://127.0.0.1:{port}/check"

    async def operate(method: str, path: str, body: object) -> Any:
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        async with session.request(method, coordinator.url + path, json=body, headers=headers) as answer:
            assert answer.status in {200, 201}, await answer.text()
            return await answer.json()

    async with aiohttp.ClientSession() as session:
        app, clients = web.Application(), {}
        for group in ("orders", "preorders"):
            await operate("PUT", f"/v1/groups/{group}", {"check": {"urls": [url]}, "topics": [topic]})
            key = (await operate("POST", "/v1/keys", {"kind": "group", "name": group}))["key"]
            clients[group] = Halfway(coordinator.url, group, key=key, barrier=barrier)
            join_aiohttp(app, clients[group], topics=[topic], check_url=url, policy=SOON)
        async with TestServer(app, port=port):
            for group, client in clients.items():
                still_open, never = client.new_id(), client.new_id()
                await client.prepare([Message(topic=topic, value="v")], id=still_open, check_after_s=600)
                prepared = await client.show(still_open)
                forged = {"type": "transaction.check", "id": still_open, "group": group, "attempt": 1}
                forged |= {"prepared_at": prepared["prepared_at"], "messages": []}
                async with session.post(url, json=forged) as answer:
                    assert answer.status == 401
                assert barrier.look(still_open) is None
                await client.prepare([Message(topic=topic, value="v")], id=never)

                async def state(client: Halfway = client, never: str = never) -> str:
                    return str((await client.show(never))["state"])

                await eventually(state, lambda found: found == "rolled_back")
