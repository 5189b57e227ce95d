import socket
from collections.abc import Iterator

import pytest

from halfway.embedded import PortTakenError
from halfway.embedded.broker import _first_ephemeral_port, bind_failure, is_free, pick_port, require_free


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_picked_port_is_free_and_no_client_s_source_port() -> None:
    port = pick_port()
    assert is_free(port)
    assert 1024 < port < _first_ephemeral_port()


def test_a_port_is_not_picked_twice() -> None:
    ports: set[int] = set()
    for _ in range(50):
        ports.add(pick_port(ports))
    assert len(ports) == 50


def test_a_port_that_somebody_listens_on_is_not_free_and_the_error_names_it(taken_port: int) -> None:
    assert not is_free(taken_port)
    with pytest.raises(PortTakenError, match=f"Port {taken_port} on 127.0.0.1 is taken") as raised:
        require_free(taken_port, patience_s=0)
    assert raised.value.port == taken_port


def test_a_port_with_connections_that_fade_away_is_free() -> None:
    port = pick_port()  # no client's source port, which could take it meanwhile
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)):
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first waits
    assert is_free(port)


@pytest.mark.parametrize(
    "log,port",
    [
        ("KafkaException: Socket server failed to bind to 127.0.0.1:9093: Address already in use.", 9093),
        ("java.net.BindException: Address already in use", 0),
        ("Kafka Server started", None),
    ],
)
def test_the_broker_s_log_tells_which_port_it_could_not_have(log: str, port: int | None) -> None:
    assert bind_failure(log) == port
