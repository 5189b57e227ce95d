"""Where a coordinator says that it listens."""

import socket

import pytest

from halfway.domain.errors import ConfigurationError
from halfway.rest.server.server import HttpServer
from halfway.runtime import app


@pytest.mark.parametrize(
    "host,url",
    [
        ("::1", "http://[::1]:8080"),
        ("fe80::1", "http://[fe80::1]:8080"),
        ("::", "http://[::1]:8080"),
        ("0.0.0.0", "http://127.0.0.1:8080"),  # noqa: S104 - nothing listens
        ("127.0.0.2", "http://127.0.0.2:8080"),
        ("localhost", "http://localhost:8080"),
    ],
)
def test_a_url_that_can_be_called(host: str, url: str) -> None:
    """An IPv6 address stands in brackets."""
    assert app.reached_at(host, 8080) == url


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 300, "192.0.2.1", "[::1]", "a\0b", "a\udcffb"])
async def test_a_host_that_cannot_be_listened_on_is_named(host: str) -> None:
    """With the setting; a name that is too long is no traceback."""

    async def nothing(_: object) -> None:
        raise AssertionError

    with pytest.raises(ConfigurationError, match="HALFWAY_PORT") as refused:
        await app.listen(HttpServer(nothing), host, 0, "HALFWAY_PORT")  # type: ignore[arg-type]
    assert host in refused.value.detail


async def test_a_taken_port_is_named() -> None:
    async def nothing(_: object) -> None:
        raise AssertionError

    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigurationError, match="is taken"):
        await app.listen(HttpServer(nothing), "127.0.0.1", other.getsockname()[1], "HALFWAY_PORT")  # type: ignore[arg-type]
