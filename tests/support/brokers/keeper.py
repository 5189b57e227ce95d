"""One Kafka for all workers of a test run: a separate program runs it, and the workers connect to it here.

The first worker that needs the Kafka starts the keeper. Each worker holds a connection to the keeper until the worker
ends or dies. With the last of these connections the keeper ends its Kafka and itself.
"""

import fcntl
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfway.embedded import broker as ports
from tests.support.ports import in_turn

_ROOT = Path(__file__).resolve().parents[3]
_MOST_BYTES = 65_536
_READY = "ready "
_FAILED = "failed "


@contextmanager
def kept_kafka(choice: str, run: str) -> Iterator[str]:
    """Yield the bootstrap servers of the Kafka that the test run `run` shares; `choice` is as for `run_kafka`.

    Raises RuntimeError with the cause if this Kafka cannot be started.
    """
    address = address_of(run)
    address.parent.mkdir(exist_ok=True)
    with _connection(choice, address) as keeper:
        answer = _read(keeper)
        if not answer.startswith(_READY):
            raise RuntimeError(answer.removeprefix(_FAILED) or "the keeper of the tests' Kafka died")
        yield answer.removeprefix(_READY)


def address_of(run: str) -> Path:
    """Return the path of the socket on which the keeper of a test run listens; it exists as long as the keeper."""
    return Path(tempfile.gettempdir(), f"halfway-test-kafka-{os.getuid()}", run)


def _connection(choice: str, address: Path) -> socket.socket:
    """Connect to the keeper at `address`, and start it if there is none."""
    connection = socket.socket(socket.AF_UNIX)
    with _locked(address):
        try:
            connection.connect(str(address))
        except (FileNotFoundError, ConnectionRefusedError):
            address.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(address))
                listener.listen()
                connection.connect(str(address))  # before the keeper looks for remaining connections
                subprocess.run(
                    [sys.executable, "-m", "tests.support.brokers.keeper", choice, address],
                    cwd=_ROOT,
                    stdin=listener.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # it ends by its connections, not by Ctrl-C
                    check=True,
                )
    return connection


def _read(keeper: socket.socket) -> str:
    """Return the keeper's answer; the keeper closes its side for writing after it."""
    answer = b""
    while chunk := keeper.recv(_MOST_BYTES):
        answer += chunk
    return answer.decode()


@contextmanager
def _locked(address: Path) -> Iterator[None]:
    """Hold the lock under which workers connect and the keeper ends."""
    lock = os.open(address.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def main(choice: str, address: Path) -> None:
    """Run Kafka until no worker is connected; standard input is the socket on which workers connect."""
    if os.fork():
        return  # the worker need not wait for the end of this process
    from tests.support.brokers.fixtures import run_kafka

    listener = socket.socket(fileno=0)
    try:
        with run_kafka(choice) as kafka:
            _answer(f"{_READY}{kafka.bootstrap_servers}", listener, address)
    except Exception as error:  # noqa: BLE001  each worker raises it again
        _answer(f"{_FAILED}{error}", listener, address)


def _answer(answer: str, listener: socket.socket, address: Path) -> None:
    """Send the answer to each worker that connects; return when all connections are closed."""
    connected: list[socket.socket] = []
    while True:
        readable, _, _ = select.select([listener, *connected], [], [])
        for connection in readable:
            if connection is listener:
                worker, _ = listener.accept()
                worker.sendall(answer.encode())
                worker.shutdown(socket.SHUT_WR)
                connected.append(worker)
            else:  # workers send nothing, so this one closed it
                connected.remove(connection)
                connection.close()
        if not connected and _has_ended(listener, address):
            return


def _has_ended(listener: socket.socket, address: Path) -> bool:
    """Return whether no worker connects any more; after that the next worker starts another keeper."""
    with _locked(address):
        waiting, _, _ = select.select([listener], [], [], 0)
        if not waiting:
            address.unlink()
        return not waiting


if __name__ == "__main__":
    ports.candidates = in_turn
    main(sys.argv[1], Path(sys.argv[2]))
