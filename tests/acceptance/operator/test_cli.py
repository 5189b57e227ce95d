"""The command line: an operator's view of a running coordinator, the topics, and `halfway dev`."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner, Result

from halfway.app.cli.main import halfway as command
from halfway.embedded.broker import HOST, is_free, pick_port
from halfway.protocol.records import OpKind
from tests.support.brokers.raw import set_quota
from tests.support.coordinator import command_line
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator
from tests.support.coordinator.rest_client import NEVER_S, Connect, Rest, message
from tests.support.coordinator.topics import Cluster, InternalTopics
from tests.support.waiting import until_true

HASTY = {"first_check_after_s": 0.1, "check_interval_s": 0.1, "max_interval_s": 0.1, "max_checks": 1}
READY_WITHIN_S = 300


class Halfway:
    """Runs commands against one coordinator; a process for each would cost a second of CPU."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def ended(self, *arguments: str) -> Result:
        environment = {"HALFWAY_URL": self._url, "HALFWAY_TOKEN": ""}
        return await asyncio.to_thread(CliRunner().invoke, command, arguments, env=environment)

    async def out(self, *arguments: str) -> str:
        ended = await self.ended(*arguments)
        assert ended.exit_code == 0, ended.output
        return ended.stdout

    async def json(self, *arguments: str) -> Any:
        return json.loads(await self.out(*arguments, "--json"))


@pytest.fixture
def halfway(coordinator: CoordinatorProcess) -> Halfway:
    return Halfway(coordinator.url)


async def test_an_operator_lists_shows_checks_resumes_and_ends(
    halfway: Halfway,
    rest: Rest,
    internal: InternalTopics,
    cluster: Cluster,
    endpoint: CheckEndpoint,
    group: str,
    topic: str,
) -> None:
    """An end by an operator has the cause `operator` in its op marker."""
    policy = json.dumps(HASTY)
    await halfway.out("groups", "put", group, "--check-url", endpoint.url, "--topic", topic, "--policy", policy)
    parked = await rest.prepared(group, [message(topic, "parked")])
    pending = await rest.prepared(group, [message(topic, "pending")], check_after_s=NEVER_S)
    await rest.until(parked, "parked")

    listed = await halfway.json("transactions", "list", "--group", group, "--state", "parked")
    assert [one["id"] for one in listed["transactions"]] == [parked]
    assert pending in await halfway.out("transactions", "list", "--group", group)
    assert (await halfway.json("transactions", "show", pending))["messages"][0]["value"] == "pending"

    await halfway.out("transactions", "check", pending)
    await endpoint.until_asked(about=pending)
    assert (await halfway.json("transactions", "resume", parked))["state"] == "prepared"
    await rest.until(parked, "parked")
    ended = await halfway.json("transactions", "end", parked, "commit", "--remark", "the customer called")
    assert (ended["state"], ended["changed"]) == ("committed", True)

    assert (await internal.kinds(parked))[-1] == (OpKind.COMMITTED, "operator")
    assert (await internal.ops(parked))[-1].remark == "the customer called"
    assert [record.value for record in await cluster.read(topic)] == [b"parked"]
    refused = await halfway.ended("transactions", "end", parked, "rollback")
    assert refused.exit_code == 1
    assert "already committed" in refused.stderr
    await halfway.out("transactions", "end", pending, "rollback")


async def test_a_coordinator_that_is_not_there_is_named(tmp_path: Path) -> None:
    url = f"http://{HOST}:{pick_port()}"
    ended = await command_line.run(tmp_path, "transactions", "list", settings={"HALFWAY_URL": url})
    assert ended.status == 1
    assert url in ended.err
    assert "Traceback" not in ended.err


async def test_topics_are_created_listed_and_verified_without_a_coordinator(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, endpoint: CheckEndpoint, tmp_path: Path
) -> None:
    """For operators whose coordinator may not create topics. The doctor says what is still missing, or wrong."""
    coordinator = new_coordinator()
    settings = coordinator.settings
    missing = await command_line.run(tmp_path, "topics", "verify", settings=settings)
    assert missing.status == 1
    assert coordinator.topic("half") in missing.out + missing.err

    looked = await command_line.run(tmp_path, "doctor", "--json", settings=settings)
    assert looked.status == 0, looked
    results = {finding["check"]: finding["result"] for finding in json.loads(looked.out)}
    assert results[f"Describe on topics {coordinator.prefix}*"] == "ok"
    assert results[f"Write on topics {coordinator.prefix}*"] == "unknown"

    created = await command_line.run(tmp_path, "topics", "create", settings=settings)

    assert created.status == 0, created
    names = {coordinator.topic(kind) for kind in ("half", "op", "parked", "groups", "owners", "audit")}
    assert names <= await cluster.topic_names()
    verified = await command_line.run(tmp_path, "topics", "verify", settings=settings)
    assert verified.status == 0, verified
    listed = await command_line.run(tmp_path, "topics", "list", settings=settings)
    assert listed.status == 0, listed
    assert all(name in listed.out for name in names)
    looked = await command_line.run(tmp_path, "doctor", settings={**settings, "HALFWAY_SHARDS": "3"})
    assert looked.status == 1, looked
    assert "HALFWAY_SHARDS=2" in looked.out

    coordinator.start()
    rest, place = connect(coordinator), endpoint.url.removesuffix("/check")
    (await rest.put_group("shop", topics=["orders"], urls=[endpoint.url])).expect(201)

    async def doctor(**over: str) -> tuple[int, dict[str, str]]:
        """Return the exit status, and what is wrong; without anything what is well."""
        ended = await command_line.run(tmp_path, "doctor", "--json", settings=settings | over)
        findings = json.loads(ended.out)
        results = {one["result"] for one in findings}
        shown = "wrong" if "wrong" in results else "ok"
        return ended.status, {one["check"]: one["detail"] for one in findings if one["result"] == shown}

    status, well = await doctor()
    assert status == 0, well
    assert {"clock", "quotas", f"check endpoint {place} of group shop"} < well.keys()
    instance = next(check for check in well if check.startswith("instance http://"))
    limited = f"{coordinator.prefix}limited"
    set_quota(cluster.bootstrap_servers, "client-id", limited, "producer_byte_rate", 1)
    status, wrong = await doctor(HALFWAY_PEER_CREDENTIAL="p" * 32)
    assert (status, list(wrong)) == (1, [instance])
    assert "HALFWAY_PEER_CREDENTIAL" in wrong[instance]
    status, wrong = await doctor(HALFWAY_CHECK_HOSTS="*.svc")
    assert (status, "HALFWAY_CHECK_HOSTS" in wrong[f"check endpoint {place} of group shop"]) == (1, True)
    gone = f"http://{HOST}:{pick_port()}"
    (await rest.put_group("shop", topics=["orders"], urls=[f"{gone}/check"])).expect(200)
    status, wrong = await doctor(HALFWAY_KAFKA__CLIENT_ID=limited)
    assert wrong.pop(f"check endpoint {gone} of group shop") == "the connection was refused"
    assert (status, list(wrong)) == (1, ["quotas"])
    assert f"kafka-configs.sh --bootstrap-server {cluster.bootstrap_servers}" in wrong["quotas"]


ANY_PORTS = {"HALFWAY_HOST": HOST, "HALFWAY_PORT": "0", "HALFWAY_HEALTH_PORT": "0"}


@pytest.mark.parametrize(
    "wrong, named",
    [({"HALFWAY_PORT": "eighty"}, "HALFWAY_PORT"), ({}, "HALFWAY_KAFKA__BOOTSTRAP_SERVERS")],
    ids=["a wrong setting", "no Kafka"],
)
async def test_a_start_that_fails_says_why_in_the_format_of_the_log(
    tmp_path: Path, wrong: dict[str, str], named: str
) -> None:
    """As JSON it is one object with the whole error."""
    ended = await command_line.run(tmp_path, "serve", settings={**ANY_PORTS, **wrong})
    assert ended.status == 1
    *_, last = ended.err.splitlines()
    line = json.loads(last)
    assert (line["event"], line["level"]) == ("start_failed", "critical")
    assert named in line["error"]


@pytest.mark.usefixtures("short_lived_brokers")
@pytest.mark.parametrize("ended_by", ["Ctrl-C", "its parent's end"])
async def test_everything_in_one_command(tmp_path: Path, ended_by: str) -> None:
    """`halfway dev --json` prints one line when it is ready, runs until it is stopped, and leaves nothing behind.

    With --with-parent it also stops when the process at its standard input ends.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HALFWAY_")}
    dev = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "halfway.app.cli", "dev", "--json", "--topic", "orders:3"),
        *("--port", "0", "--health-port", "0", *(["--with-parent"] if ended_by != "Ctrl-C" else [])),
        cwd=tmp_path,
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert dev.stdout is not None
        async with asyncio.timeout(READY_WITHIN_S):
            ready = json.loads(await dev.stdout.readline())
        assert set(ready) == {"url", "health_url", "bootstrap_servers", "console_url"}
        async with aiohttp.ClientSession() as session:
            rest = Rest(session, ready["url"], ready["health_url"])
            assert (await rest.health("/health/ready"))[0] == 200
            async with session.get(ready["console_url"]) as page:
                assert (page.status, page.content_type) == (200, "text/html")
            (await rest.put_group("orders", topics=["orders"])).expect(201)
            await rest.commit(await rest.prepared("orders", [message("orders", "first")]))
        records = await Cluster(ready["bootstrap_servers"]).read("orders")
        assert [record.value for record in records] == [b"first"]

        if ended_by == "Ctrl-C":
            dev.send_signal(signal.SIGINT)
        else:
            assert dev.stdin is not None
            dev.stdin.close()
        async with asyncio.timeout(READY_WITHIN_S):
            rest_of_output, _ = await dev.communicate()
        assert dev.returncode == 0
        assert rest_of_output == b"", "one line and no more"
    finally:
        if dev.returncode is None:
            dev.kill()
            await dev.wait()
    port = int(ready["bootstrap_servers"].rpartition(":")[2])
    await until_true(lambda: is_free(port), what="the broker has ended")
