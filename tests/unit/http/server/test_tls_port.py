"""TLS on a port: client certificates take the place of keys, and changed files are read again while it serves."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from halfway.coordinator.access import KeySpec
from halfway.http.requests.authentication import caller_of, names_in
from halfway.http.server.server import HttpServer, ServerTls
from halfway.protocol.errors import ConfigurationError
from halfway.protocol.principal import Permission, PrincipalKind
from tests.support.certificates import Authority
from tests.support.rest.client import HOST, RestWorld
from tests.support.rest.guarded import OPERATOR, deadline, enable_access
from tests.support.service.broker import Memory
from tests.support.waiting import GENEROUS_S, until_true


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Authority, Authority]]:
    folder = tmp_path_factory.mktemp("authorities")
    yield Authority(folder, "one"), Authority(folder, "two")
    shutil.rmtree(folder)


class Served:
    """An interface that requires keys or certificates, with the files `certificate`, `key` and `clients`."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.folder = folder
        self.use(authority)
        self.tls = ServerTls(
            certificate=folder / "certificate", key=folder / "key", client_authorities=folder / "clients"
        )
        memory = Memory(shards=2, topics={"orders": 3})
        self.keys = enable_access(memory)
        self.world = RestWorld(memory=memory, keys=self.keys, tls=self.tls)

    def use(self, authority: Authority) -> None:
        """Replace the files, as a renewal does."""
        certificate, key = authority.sign("server", "CN=halfway", "IP:127.0.0.1")
        for name, source in (("certificate", certificate), ("key", key), ("clients", authority.file)):
            shutil.copy(source, self.folder / "next")
            (self.folder / "next").replace(self.folder / name)

    async def bind(self, kind: PrincipalKind, name: str, certificate: str) -> None:
        spec = KeySpec(kind=kind, name=name, certificate=certificate)
        await self.keys.create(spec, deadline=deadline(), principal=OPERATOR)

    async def status(self, context: ssl.SSLContext, path: str = "/v1/groups") -> int | str:
        """Return the status of a request on a new connection, or the name of the error."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=GENEROUS_S)) as session:
            try:
                async with session.get(self.world.url + path, ssl=context) as answer:
                    return answer.status
            except (aiohttp.ClientError, OSError) as error:
                return type(error).__name__


@pytest.fixture
async def served(tmp_path: Path, authorities: tuple[Authority, Authority]) -> AsyncIterator[Served]:
    served = Served(tmp_path, authorities[0])
    async with served.world:
        yield served


async def test_a_certificate_of_a_client_stands_for_a_key(
    served: Served, authorities: tuple[Authority, Authority]
) -> None:
    """By an alternative name or by its subject; an unbound certificate, and no certificate, are 401."""
    one, two = authorities
    shop = one.trusted(one.sign("shop", "CN=shop,O=Acme", "DNS:shop.svc,URI:spiffe://acme/shop"))
    assert await served.status(one.trusted()) == 401
    assert await served.status(shop) == 401
    await served.bind(PrincipalKind.READER, "board", "URI:spiffe://acme/shop")
    assert await served.status(shop) == 200
    assert await served.status(shop, "/v1/keys") == 403
    named = one.trusted(one.sign("named", "CN=by name,O=Acme\\, Inc.", "DNS:unknown"))
    await served.bind(PrincipalKind.OPERATOR, "alice", "subject:CN=by name,O=Acme\\, Inc.")
    assert await served.status(named, "/v1/keys") == 200
    foreign = one.trusted(two.sign("shop", "CN=shop,O=Acme", "URI:spiffe://acme/shop"))
    assert isinstance(await served.status(foreign), str), "another authority's certificate is no way in"


async def test_files_that_change_are_read_again(served: Served, authorities: tuple[Authority, Authority]) -> None:
    """New connections use the new certificate and the new authorities; open connections continue."""
    one, two = authorities
    await served.bind(PrincipalKind.READER, "board", "URI:spiffe://acme/board")
    before, after = (each.trusted(each.sign("board", "CN=board", "URI:spiffe://acme/board")) for each in (one, two))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=before)) as kept:
        async with kept.get(f"{served.world.url}/v1/groups") as answer:
            assert answer.status == 200
        served.use(two)
        served.tls.reload_if_changed()
        assert await served.status(after) == 200
        assert isinstance(await served.status(before), str)
        async with kept.get(f"{served.world.url}/v1/groups") as answer:
            assert answer.status == 200


async def test_files_that_are_of_no_use_leave_the_old_ones_in_use(
    served: Served, authorities: tuple[Authority, Authority]
) -> None:
    one, two = authorities
    (served.folder / "certificate").write_text("half a file")
    served.tls.reload_if_changed()
    assert await served.status(one.trusted()) == 401
    (served.folder / "key").unlink()
    served.tls.reload_if_changed()
    assert await served.status(one.trusted()) == 401
    served.use(two)
    served.tls.reload_if_changed()
    assert await served.status(two.trusted()) == 401


async def test_who_sent_a_request_is_known_also_once_its_connection_is_lost(
    served: Served, authorities: tuple[Authority, Authority]
) -> None:
    """An arrived request is carried out as with a key: its caller is known even if the client has disconnected."""
    one, _ = authorities
    await served.bind(PrincipalKind.GROUP, "shop", "URI:spiffe://acme/shop")
    shop = one.trusted(one.sign("shop", "CN=shop", "URI:spiffe://acme/shop"))
    requests: list[web.BaseRequest] = []
    gone = asyncio.Event()

    async def wait_for_release(request: web.BaseRequest) -> web.StreamResponse:
        requests.append(request)
        await gone.wait()
        return web.Response()

    server = HttpServer(wait_for_release)
    port = await server.start(HOST, 0, served.tls)
    try:
        _, writer = await asyncio.open_connection(HOST, port, ssl=shop)
        writer.write(b"POST /v1/transactions/x/end HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")
        await until_true(lambda: bool(requests))
        writer.transport.abort()
        await until_true(lambda: requests[0].transport is None)
        caller = caller_of(requests[0], Permission.END, served.world.coordinator.authority)
        assert (caller.kind, caller.name) == (PrincipalKind.GROUP, "shop")
    finally:
        gone.set()
        await server.stop()


async def test_plain_http_gets_no_answer_on_such_a_port(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.world.port)
    writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"200" not in await asyncio.wait_for(reader.read(), GENEROUS_S)
    writer.close()


def test_what_is_no_certificate_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "none").write_text("nothing")
    with pytest.raises(ConfigurationError, match="none"):
        ServerTls(certificate=tmp_path / "none", key=tmp_path / "none")


@pytest.mark.parametrize(
    "subject,told",
    [
        (((("commonName", "shop"),),), "subject:CN=shop"),
        (((("organizationName", "Acme"),), (("commonName", "shop"),)), "subject:CN=shop,O=Acme"),
        (((("commonName", 'a,b+c"d\\e;<>'),),), 'subject:CN=a\\,b\\+c\\"d\\\\e\\;\\<\\>'),
        (((("commonName", "#x "),),), "subject:CN=\\#x\\ "),
        (((("commonName", "shop"), ("userId", "7")),), "subject:CN=shop+UID=7"),
    ],
)
def test_a_subject_is_written_so_that_no_other_subject_is_written_alike(subject: object, told: str) -> None:
    assert names_in({"subject": subject}) == (told,)
    assert names_in({}) == names_in(None) == ()
