"""Known keys, secrets and payloads are sent through every interface, and must not appear in the wrong places."""

import base64
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfway.protocol.keys import RANDOM_BYTES, key_text
from halfway.protocol.principal import PrincipalKind
from tests.support.canary import Canaries
from tests.support.coordinator import command_line
from tests.support.coordinator.endpoints import Endpoints, RawConversation, http_response
from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator
from tests.support.coordinator.topics import Cluster
from tests.support.ids import new_id
from tests.support.waiting import eventually

MASTER = "canary-master-secret-4b1f0c7a2e9d"
FORMER_MASTER = "canary-former-master-secret-77d1"
PEER = "canary-peer-credential-91c5"
KAFKA_PASSWORD = "canary-kafka-password-3e6b"
OPERATOR = key_text(PrincipalKind.OPERATOR, bytes(range(100, 100 + RANDOM_BYTES)))
URL_TOKEN = "canary-url-token-5a2d"
KEY, VALUE, HEADER = "canary-message-key-1", "canary-message-value-2", "canary-header-value-3"
BINARY = b"\x00\xffcanary-binary-4\x01"
ANSWER = "canary-answer-of-the-endpoint-6"
MESSAGES: list[dict[str, object]] = [
    {"key": KEY, "value": VALUE, "headers": [{"name": "trace", "value": HEADER}]},
    {"key": KEY, "value": {"type": "JSON", "data": {"total": VALUE}}},
    {"value": {"type": "BINARY", "data": base64.b64encode(BINARY).decode()}},
]
SECRETS: dict[str, str | bytes] = {
    "master secret": MASTER,
    "former master secret": FORMER_MASTER,
    "peer credential": PEER,
    "Kafka password": KAFKA_PASSWORD,
    "operator's key": OPERATOR,
}
PAYLOADS: dict[str, str | bytes] = {
    "message key": KEY,
    "message value": VALUE,
    "header": HEADER,
    "binary": BINARY,
    "answer": ANSWER,
}
SETTINGS = {
    "HALFWAY_MASTER_SECRET": MASTER,
    "HALFWAY_MASTER_SECRET_PREVIOUS": FORMER_MASTER,
    "HALFWAY_PEER_CREDENTIAL": PEER,
    "HALFWAY_OPERATOR_KEY": OPERATOR,
    "HALFWAY_OPEN_ACCESS": "false",
    "HALFWAY_KAFKA__SASL_PASSWORD": KAFKA_PASSWORD,
    "HALFWAY_LOG_LEVEL": "debug",
}
QUICK = {"first_check_after_s": 0.2, "check_interval_s": 0.2, "max_interval_s": 0.4, "max_checks": 2}


class Story:
    """Calls of several callers; answers to callers other than the owner are collected."""

    def __init__(self, session: aiohttp.ClientSession, coordinator: CoordinatorProcess) -> None:
        self._session = session
        self._coordinator = coordinator
        self.told: list[tuple[str, str]] = []
        self.parked = ""

    async def call(
        self, key: str | None, method: str, path: str, body: Any = None, *, own: bool = False, raw: bytes | None = None
    ) -> Any:
        """Make a call and return the body; `own` is set if the answer goes to the owner of the data in it."""
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        async with self._session.request(method, self._coordinator.url + path, data=data, headers=headers) as answer:
            text = await answer.text()
            if not own:
                self.told.append((f"{method} {path} {answer.status}", f"{dict(answer.headers)} {text}"))
            return json.loads(text) if text else None

    async def state(self, key: str, name: str) -> str:
        return str((await self.call(key, "GET", f"/v1/transactions/{name}", own=True)).get("state"))

    async def until(self, key: str, name: str, state: str) -> None:
        await eventually(lambda: self.state(key, name), lambda found: found == state)

    async def make_keys(self, canaries: Canaries) -> dict[str, str]:
        """Make, rotate and revoke keys; return those of the group `shop`, a reader, and one that is revoked."""
        made = {}
        for kind, name in (("group", "shop"), ("reader", "board"), ("group", "spare")):
            made[name] = await self.call(OPERATOR, "POST", "/v1/keys", {"kind": kind, "name": name}, own=True)
        spare = made["spare"]["id"]
        made["revoked"] = await self.call(OPERATOR, "POST", f"/v1/keys/{spare}/rotate", {}, own=True)
        await self.call(OPERATOR, "DELETE", f"/v1/keys/{made['revoked']['id']}")
        return {name: canaries.add(f"key of {name}", one["key"]) for name, one in made.items()}

    async def mistakes(self, key: str, prepared: Mapping[str, Any], topic: str, known: str) -> None:
        """Send requests that are refused, with payloads and keys that an error could repeat."""

        def of(*messages: Mapping[str, object], **fields: object) -> bytes:
            return json.dumps(
                {"group": "shop", "messages": [{"topic": topic} | dict(m) for m in messages], **fields}
            ).encode()

        wrong = [
            json.dumps(prepared).encode()[:-2],
            json.dumps({**prepared, "extra": VALUE}).encode(),
            json.dumps({**prepared, "group": 7, "check_after_s": "soon"}).encode(),
            json.dumps({**prepared, "group": "unknown"}).encode(),
            of({"value": {"type": "BINARY", "data": VALUE}}),
            of({"value": {"type": VALUE, "data": 1}}),
            of({"value": [VALUE], "key": {"a": KEY}}),
            of({"value": VALUE, "headers": [{"name": f"{HEADER}\n", "value": HEADER}]}),
            of({"value": VALUE}, id=known),
            of({"value": VALUE, "topic": "no-such-topic"}),
            VALUE.encode(),
        ]
        for body in wrong:
            await self.call(key, "POST", "/v1/transactions", raw=body)
            await self.call(key, "POST", "/v1/batch", raw=b'{"prepare": [' + body + b'], "end": []}')
        for shown in (key[:-1], key + "x", key[::-1], MASTER):
            await self.call(shown, "GET", "/v1/transactions")

    async def look_around(self, key: str) -> None:
        """Collect the output for readers and tools."""
        for path in (f"/v1/transactions/{self.parked}", "/v1/transactions?group=shop", "/v1/keys", "/openapi.json"):
            await self.call(key, "GET", path)
        await self.call(OPERATOR, "GET", "/v1/transactions?group=shop")
        await self.call(OPERATOR, "GET", "/v1/keys")
        for path in ("/metrics", "/health/ready"):
            url, headers = self._coordinator.health_url + path, {"Authorization": f"Bearer {key}"}
            async with self._session.get(url, headers=headers) as answer:
                assert answer.status == 200, path
                self.told.append((path, await answer.text()))

    async def audit_log(self, directory: Path) -> set[str]:
        """Return the actions that `halfway audit-log` shows."""
        shown = await command_line.run(directory, "audit-log", "--json", settings=self._coordinator.settings)
        assert shown.status == 0, shown
        self.told.append(("halfway audit-log", shown.out + shown.err))
        return {json.loads(line)["action"] for line in shown.out.splitlines()}


async def ugly(conversation: RawConversation) -> None:
    """Answer without a verdict, with a canary in every part that an error could repeat."""
    head = f"Content-Type: application/{ANSWER}\r\nX-{ANSWER}: {ANSWER}"
    await conversation.send(http_response(ANSWER.encode(), status=f"500 {ANSWER}", headers=head))


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as made:
        yield made


async def test_no_key_secret_or_payload_is_in_anything_that_is_not_its_owners(
    new_coordinator: NewCoordinator,
    session: aiohttp.ClientSession,
    endpoints: Endpoints,
    cluster: Cluster,
    topic: str,
    tmp_path: Path,
) -> None:
    """Not in the debug log, metrics, errors, OpenAPI, lists, the view of a reader, or the audit trail."""
    canaries = Canaries(SECRETS | PAYLOADS)
    coordinator = new_coordinator(SETTINGS).start()
    story = Story(session, coordinator)
    hostile, honest = await endpoints.raw(ugly), await endpoints.check("unknown")
    keys = await story.make_keys(canaries)
    shop = keys["shop"]

    def group(url: str) -> dict[str, object]:
        return {"check": {"urls": [f"{url}?token={URL_TOKEN}"]}, "topics": [topic], "policy": QUICK}

    await story.call(OPERATOR, "PUT", "/v1/groups/shop", group(hostile.url), own=True)
    shown = await story.call(shop, "GET", "/v1/groups/shop/check-secrets", own=True)
    for number, secret in enumerate(shown["secrets"]):
        canaries.add(f"check secret {number}", secret.removeprefix("whsec_"))
    prepared = {"group": "shop", "messages": [{"topic": topic, **message} for message in MESSAGES]}
    parks, commits = new_id(), new_id()
    story.parked = parks
    for name in (parks, commits):
        await story.call(shop, "POST", "/v1/transactions", prepared | {"id": name})
        await story.until(shop, name, "parked")
    await story.look_around(keys["board"])
    await story.call(shop, "PUT", "/v1/groups/shop", group(honest.url), own=True)
    # No call waits for the audit trail's topic, so a kill may lose the latest events.
    await eventually(lambda: story.audit_log(tmp_path), lambda found: "change_group" in found)
    coordinator.kill()
    coordinator.start()

    end = {"outcome": "rollback", "remark": "looked it up"}
    await story.call(OPERATOR, "POST", f"/v1/transactions/{parks}/end", end)
    honest.answer("commit")
    await story.call(OPERATOR, "POST", f"/v1/transactions/{commits}/resume")
    await story.call(shop, "POST", f"/v1/transactions/{commits}/check")
    await story.until(shop, commits, "committed")
    await story.mistakes(shop, prepared, topic, commits)
    expected = {"create_key", "rotate_key", "revoke_key", "register_group", "change_group", "resume", "end_by_hand"}
    await eventually(lambda: story.audit_log(tmp_path), lambda found: expected <= found)
    await story.look_around(keys["board"])
    coordinator.stop()

    canaries.add("token in a URL", URL_TOKEN)
    for kind in ("op", "owners", "audit", "keys"):
        for record in await cluster.read(coordinator.topic(kind)):
            story.told.append((f"the topic {kind}", f"{record.key!r} {record.headers!r}"))
            assert canaries.found_in(record.value or b"") == [], (kind, record)
    story.told += [("the log", line) for line in coordinator.log.splitlines()]
    leaks = [(where, canaries.found_in(text), text[:500]) for where, text in story.told if canaries.found_in(text)]
    assert leaks == []
    assert len(story.told) > 100
