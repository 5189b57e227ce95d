"""The addresses that a coordinator listens on and reports."""

import socket

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from halfway.app.serve import addresses, app
from halfway.app.serve.addresses import default_instance_url
from halfway.app.settings import load
from halfway.http.server.server import HttpServer
from halfway.protocol.errors import ConfigurationError, ForbiddenError


async def fail(_: web.BaseRequest) -> web.StreamResponse:
    raise AssertionError


@pytest.mark.parametrize(
    "host,url",
    [
        ("::1", "http://[::1]:8080"),
        ("fe80::1", "http://[fe80::1]:8080"),
        ("::", "http://[::1]:8080"),
        ("0.0.0.0", "http://127.0.0.1:8080"),  # noqa: S104 - nothing listens on it
        ("127.0.0.2", "http://127.0.0.2:8080"),
        ("localhost", "http://localhost:8080"),
    ],
)
def test_a_url_that_can_be_called(host: str, url: str) -> None:
    """An IPv6 address is in brackets."""
    assert addresses.local_url(host, 8080) == url


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 300, "192.0.2.1", "[::1]", "a\0b", "a\udcffb"])
async def test_a_host_that_cannot_be_listened_on_is_named(host: str) -> None:
    """With the setting; a too long name causes no traceback."""
    with pytest.raises(ConfigurationError, match="HALFWAY_PORT") as refused:
        await addresses.listen(HttpServer(fail), host, 0, "HALFWAY_PORT")
    assert host in refused.value.detail


def address_info(*addresses: tuple[int, str]) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    """Return the result of a look-up of a host with these addresses."""
    return [
        (family, socket.SOCK_STREAM, 0, "", (host, 0, 0, 0) if family == socket.AF_INET6 else (host, 0))
        for family, host in addresses
    ]


@pytest.mark.parametrize("missing", [(socket.AF_INET6, "2001:db8::1"), (socket.AF_INET, "192.0.2.1"), (99, "x")])
async def test_an_address_that_this_machine_lacks_is_left_out(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[int, str]
) -> None:
    """`localhost` has one if IPv6 is off; a host without any existing address is refused."""
    found = address_info(missing, (socket.AF_INET, "127.0.0.1"))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    server = HttpServer(fail)
    await addresses.listen(server, "halfway.test", 0, "HALFWAY_PORT")
    assert server.port
    await server.stop()
    del found[1]
    with pytest.raises(ConfigurationError, match="HALFWAY_PORT"):
        await addresses.listen(server, "halfway.test", 0, "HALFWAY_PORT")


async def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigurationError, match="is taken"):
        await addresses.listen(HttpServer(fail), "127.0.0.1", other.getsockname()[1], "HALFWAY_PORT")


OPEN = "::", "0.0.0.0", "10.0.0.1", "", "halfway.shop.svc"  # noqa: S104 - it is refused


@pytest.mark.parametrize("host", OPEN)
def test_without_keys_it_listens_to_this_machine_only_unless_the_operator_says_so(host: str) -> None:
    """The refusal names all three remedies."""
    with pytest.raises(ConfigurationError) as caught:
        addresses.demand_guarded(load({"HALFWAY_HOST": host}))
    assert all(name in caught.value.detail for name in ("MASTER_SECRET", "HALFWAY_HOST=127.0.0.1", "OPEN_ACCESS=true"))
    for allowed in (
        {"HALFWAY_HOST": host, "HALFWAY_OPEN_ACCESS": "true"},
        {"HALFWAY_HOST": host, "HALFWAY_MASTER_SECRET": "m" * 32},
        *({"HALFWAY_HOST": loopback} for loopback in ("127.0.0.1", "::1", "localhost")),
    ):
        addresses.demand_guarded(load(allowed))


def test_without_keys_a_console_on_the_health_port_puts_the_api_on_no_open_address() -> None:
    """The health port then serves the API too, and by default everybody can reach it."""
    served = {"HALFWAY_HOST": "127.0.0.1", "HALFWAY_CONSOLE": "health"}
    with pytest.raises(ConfigurationError, match=r"HALFWAY_HEALTH_HOST=127\.0\.0\.1") as caught:
        addresses.demand_guarded(load(served))
    assert "because of HALFWAY_CONSOLE=health" in caught.value.detail
    for more in ("HALFWAY_HEALTH_HOST", "127.0.0.1"), ("HALFWAY_OPEN_ACCESS", "true"), ("HALFWAY_CONSOLE", "api"):
        addresses.demand_guarded(load(served | dict([more])))
    assert not is_served("evil.example", served | {"HALFWAY_OPEN_ACCESS": "true"})


def is_served(host: str | None, settings: dict[str, str]) -> bool:
    """Return whether a request for a host is served."""
    headers = {} if host is None else {"Host": host}
    try:
        addresses.demand_host(load(settings))(make_mocked_request("GET", "/", headers))
    except ForbiddenError as error:
        return "HALFWAY_ALLOWED_HOSTS" not in error.detail
    return True


LOCAL = {"HALFWAY_HOST": "127.0.0.1"}
OWN = ("localhost", "localhost:8080", "LOCALHOST.", "127.0.0.1:8080", "10.0.0.1", "[::1]:8080", None)
FOREIGN_NAMES = ("evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example")
FOREIGN = (*FOREIGN_NAMES, "1.2.3", "x", "", "[x", "a@localhost", "localhost:x")


def test_on_loopback_without_keys_a_page_of_another_name_is_not_served() -> None:
    """Its owner makes the name resolve to this machine, so a browser takes halfway for the page's own site."""
    assert [host for host in OWN if not is_served(host, LOCAL)] == []
    assert [host for host in FOREIGN if is_served(host, LOCAL)] == []


def test_the_operator_names_further_hosts() -> None:
    """Also with access control, and in addition to the host of the instance's own URL."""
    named = {"HALFWAY_ALLOWED_HOSTS": "halfway.shop.svc, *.Example"}
    for settings in (LOCAL, {"HALFWAY_HOST": "", "HALFWAY_MASTER_SECRET": "m" * 32}):
        served = settings | named | {"HALFWAY_INSTANCE_URL": "http://pod-1.halfway:8080"}
        for host in ("halfway.shop.svc:8080", "a.example", "pod-1.halfway:8080", *OWN):
            assert is_served(host, served)
        assert not is_served("halfway.shop.svc.evil", served)


def test_any_host_will_do_where_a_page_gains_nothing_or_the_operator_lets_everybody_in() -> None:
    for settings in ({"HALFWAY_HOST": "", "HALFWAY_OPEN_ACCESS": "true"}, LOCAL | {"HALFWAY_MASTER_SECRET": "m" * 32}):
        assert is_served("evil.example", settings)


def test_serve_on_an_open_address_ends_before_it_listens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command follows the rule above, and prints its remedy."""
    served: list[object] = []
    monkeypatch.setattr(app, "configure", lambda **_: None)
    monkeypatch.setattr(app, "collect_rarely", lambda: None)
    monkeypatch.setattr(app, "_serve", lambda *_: None)
    monkeypatch.setattr(app, "_run_loop", served.append)
    assert app.run(load({"HALFWAY_HOST": "192.0.2.1"})) == 1
    assert served == []
    assert "HALFWAY_OPEN_ACCESS=true" in capsys.readouterr().out
    assert app.run(load({"HALFWAY_HOST": "192.0.2.1", "HALFWAY_OPEN_ACCESS": "true"})) == 0
    assert served == [None]


def url_of(host: str, bootstrap_servers: str = "127.0.0.1:9092", *, tls: bool = False) -> str:
    return default_instance_url(host=host, port=8080, bootstrap_servers=bootstrap_servers, tls=tls)


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Give the addresses from which this machine reaches others, for the test to fill."""
    routes: dict[str, str] = {}
    monkeypatch.setattr(addresses, "_address_towards", lambda remote, _: routes.get(remote))
    return routes


@pytest.mark.parametrize(
    "servers", ["broker:9092", "lost:9092, SSL://broker:9093", "[2001:db8::7]:9092", "2001:db8::7", "broker"]
)
def test_the_default_url_for_other_instances_has_the_address_that_reaches_kafka(
    routes: dict[str, str], servers: str
) -> None:
    """A machine's name is unknown to other pods; an address is not."""
    routes |= {"broker": "10.1.2.3", "2001:db8::7": "10.1.2.3", "192.0.2.1": "198.51.100.1"}
    expected = "http://198.51.100.1:8080" if servers == "2001:db8::7" else "http://10.1.2.3:8080"
    assert url_of("0.0.0.0", servers) == expected  # noqa: S104 - nothing listens on it


def test_the_default_url_without_a_route_to_kafka(routes: dict[str, str]) -> None:
    """The default route's address, then the machine's name; the address it listens on, if that is a single one."""
    assert url_of("0.0.0.0") == f"http://{socket.gethostname()}:8080"  # noqa: S104
    routes["192.0.2.1"] = "198.51.100.1"
    assert url_of("0.0.0.0") == "http://198.51.100.1:8080"  # noqa: S104
    assert url_of("127.0.0.1") == "http://127.0.0.1:8080"
    assert url_of("2001:db8::1") == "http://[2001:db8::1]:8080"
    assert url_of("halfway.example") == "http://halfway.example:8080"
    assert url_of("0.0.0.0", tls=True) == f"https://{socket.gethostname()}:8080"  # noqa: S104 - a certificate has names
    routes |= {"2001:db8::1": "2001:db8::5"}
    routes.pop("192.0.2.1")
    assert url_of("::") == "http://[2001:db8::5]:8080"
