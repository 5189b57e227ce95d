"""Two instances with TLS on both ports, which call each other over TLS, and load a new certificate while they run."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from halfway.embedded.broker import HOST
from tests.support.brokers.fixtures import Kafka
from tests.support.certificates import Authority
from tests.support.coordinator.fleet import SHARDS, Fleet, id_in, settled
from tests.support.coordinator.rest_client import QUIET, Rest, message
from tests.support.coordinator.topics import Cluster
from tests.support.waiting import eventually

NAMES = ("CN=halfway", f"IP:{HOST}")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Create an authority that no client trusts by default."""
    return Authority(tmp_path, "own")


@pytest.fixture
def fleet(kafka: Kafka, tmp_path: Path, authority: Authority) -> Iterator[Fleet]:
    certificate, key = authority.sign("port", *NAMES)
    settings = {
        "HALFWAY_TLS_CERTIFICATE_FILE": str(certificate),
        "HALFWAY_TLS_KEY_FILE": str(key),
        "HALFWAY_HEALTH_TLS": "true",
        "HALFWAY_PEER_CA_FILE": str(authority.file),
    }
    fleet = Fleet(kafka.bootstrap_servers, tmp_path, settings)
    try:
        yield fleet
        for member in fleet.members:
            assert '"exception"' not in member.log
    finally:
        fleet.close()


@pytest.fixture
async def session(authority: Authority) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=authority.trusted())
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240), connector=connector) as session:
        yield session


def text_of(certificate: Path) -> str:
    return certificate.read_text().strip()


async def served_on(ports: list[int], authority: Authority) -> set[str]:
    """Return the certificates of these ports."""
    shown = [
        await asyncio.to_thread(ssl.get_server_certificate, (HOST, port), ca_certs=str(authority.file))
        for port in ports
    ]
    return {text.strip() for text in shown}


async def test_instances_serve_and_ask_one_another_by_tls_and_take_a_new_certificate_without_a_restart(
    fleet: Fleet, cluster: Cluster, session: aiohttp.ClientSession, authority: Authority, topic: str, group: str
) -> None:
    fleet.start(2)
    certificate = Path(fleet.settings["HALFWAY_TLS_CERTIFICATE_FILE"])
    rests = [Rest(session, member.url, member.health_url) for member in fleet.members]
    ports = [port for member in fleet.members for port in (member.port, member.health_port)]
    pids = [member.pid for member in fleet.members]
    assert all(url.startswith("https:") for rest in rests for url in (rest.url, rest.health_url))
    await settled(rests)
    (await rests[0].put_group(group, topics=[topic], policy=QUIET)).expect(201)

    async def each_ends_a_transaction_of_each_shard() -> list[str]:
        """The other instance has half of the shards, so half of the calls are forwarded."""
        names = [id_in(shard) for _ in rests for shard in range(SHARDS)]
        for number, name in enumerate(names):
            one, another = rests[number // SHARDS], rests[1 - number // SHARDS]
            await one.prepared(group, [message(topic, value=name)], as_id=name, retry=True)
            await another.commit(name, retry=True)
        return names

    committed = await each_ends_a_transaction_of_each_shard()
    old = text_of(certificate)
    assert await served_on(ports, authority) == {old}

    assert authority.sign("port", *NAMES)[0] == certificate
    new = text_of(certificate)
    assert new != old
    await eventually(lambda: served_on(ports, authority), lambda shown: shown == {new})
    committed += await each_ends_a_transaction_of_each_shard()
    assert [member.pid for member in fleet.members] == pids
    assert all(member.running for member in fleet.members)
    assert sorted((record.value or b"").decode() for record in await cluster.read(topic)) == sorted(committed)
    for port in ports:
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://{HOST}:{port}/")
