"""Two instances with TLS on both ports, which call each other over TLS; certificate and authority are replaced."""

import asyncio
import shutil
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
def next_authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "next")


@pytest.fixture
async def session(authority: Authority, next_authority: Authority) -> AsyncIterator[aiohttp.ClientSession]:
    """A client that trusts both authorities."""
    trusting = authority.trusted()
    trusting.load_verify_locations(next_authority.file)
    connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=trusting)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240), connector=connector) as session:
        yield session


def text_of(certificate: Path) -> str:
    return certificate.read_text().strip()


async def served_on(ports: list[int]) -> set[str]:
    """Return the certificates of these ports, whoever signed them."""
    shown = [await asyncio.to_thread(ssl.get_server_certificate, (HOST, port)) for port in ports]
    return {text.strip() for text in shown}


async def test_instances_serve_and_ask_one_another_by_tls_and_take_new_files_without_a_restart(
    fleet: Fleet,
    cluster: Cluster,
    session: aiohttp.ClientSession,
    authority: Authority,
    next_authority: Authority,
    topic: str,
    group: str,
) -> None:
    fleet.start(2)
    certificate = Path(fleet.settings["HALFWAY_TLS_CERTIFICATE_FILE"])
    rests = [Rest(session, member.url, member.health_url) for member in fleet.members]
    ports = [port for member in fleet.members for port in (member.port, member.health_port)]
    pid = fleet.members[0].pid
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
    assert await served_on(ports) == {old}

    for source, name in zip(next_authority.sign("port", *NAMES), ("CERTIFICATE", "KEY"), strict=True):
        shutil.copy(source, fleet.settings[f"HALFWAY_TLS_{name}_FILE"])
    shutil.copy(next_authority.file, authority.file)
    new = text_of(certificate)
    assert new != old
    await eventually(lambda: served_on(ports), lambda shown: shown == {new})
    first, second = fleet.members
    second.stop()  # so the first must connect anew
    second.start()
    await settled(rests)
    committed += await each_ends_a_transaction_of_each_shard()
    assert first.running
    assert first.pid == pid
    assert sorted((record.value or b"").decode() for record in await cluster.read(topic)) == sorted(committed)
    for port in ports:
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://{HOST}:{port}/")
