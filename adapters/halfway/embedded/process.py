"""A process that always ends with this one (the parent's side of `supervisor.py`), and whether its broker is ready."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from halfway.embedded.errors import SupervisorError

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
# Starting Python and the child takes 0.1 s; a machine under heavy load may need much longer.
_ANSWER_TIMEOUT_S = 30


class SupervisedProcess:
    """A running process, its output appended to `log_path`.

    The directory `doomed` is deleted if our own process dies first. The supervisor inherits the file descriptor `hold`
    of a lock, so the lock is held until the process has ended.

    Signals go through the supervisor, which knows whether the process still lives, so that no signal reaches another
    process with a reused id. Not thread-safe.
    """

    def __init__(
        self, command: Sequence[str], *, cwd: Path, log_path: Path, doomed: Path | None = None, hold: int | None = None
    ) -> None:
        self._pending = b""
        self._status: int | None = None
        with log_path.open("ab") as log:
            self._supervisor = subprocess.Popen(  # noqa: S603  our own file
                [
                    sys.executable,
                    *("-I", "-S", str(_SUPERVISOR)),
                    *(str(os.getpid()), str(log_path), str(doomed or "")),
                    *command,
                ],
                cwd=cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Only we get a Ctrl-C in the terminal, and we stop the broker in our own order.
                start_new_session=True,
                pass_fds=() if hold is None else (hold,),
            )
        try:
            word, _, value = self._next_line(_ANSWER_TIMEOUT_S).partition(" ")
        except TimeoutError:
            word, value = "", "no answer in time"
        if word != "pid":
            self._finish()
            raise SupervisorError(f"{command[0]} could not be started: {value or word or f'see {log_path}'}")
        self.pid = int(value)

    def poll(self) -> int | None:
        """Return the exit status (minus the signal number if a signal killed it), or None while it runs."""
        return self.wait(0)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; return the exit status, or None if it still runs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._status is None:
            try:
                line = self._next_line(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return None
            self._record_end(line)
        return self._status

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._command(b"t")

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self._command(b"k")
        if self.wait(_ANSWER_TIMEOUT_S) is None:
            raise SupervisorError(f"Process {self.pid} does not end after SIGKILL.")

    def pause(self) -> None:
        """Send SIGSTOP."""
        self._command(b"p")

    def resume(self) -> None:
        """Send SIGCONT."""
        self._command(b"c")

    def _command(self, command: bytes) -> None:
        """Send a signal through the supervisor and wait until it is sent; do nothing if the process has ended."""
        if self.poll() is not None:
            return
        assert self._supervisor.stdin is not None  # noqa: S101  it is a pipe
        try:
            os.write(self._supervisor.stdin.fileno(), command)
        except BrokenPipeError:
            self.wait(_ANSWER_TIMEOUT_S)
            return
        try:
            line = self._next_line(_ANSWER_TIMEOUT_S)
        except TimeoutError:
            raise SupervisorError(f"The supervisor of process {self.pid} does not answer.") from None
        if line != "ok":
            self._record_end(line)

    def _record_end(self, line: str) -> None:
        """Record the end of the process. An empty line means that the supervisor is dead, and its child with it."""
        word, _, value = line.partition(" ")
        if word not in {"exited", ""}:
            raise SupervisorError(f"The supervisor of process {self.pid} sent an unexpected line: {line!r}.")
        self._finish()
        self._status = int(value) if value else -9

    def _next_line(self, timeout_s: float) -> str:
        """Return the supervisor's next line, "" at the end of its output; TimeoutError if it takes longer."""
        assert self._supervisor.stdout is not None  # noqa: S101  it is a pipe
        output = self._supervisor.stdout.fileno()
        # Not select(), which refuses file descriptors from 1024 on.
        readable = select.poll()
        readable.register(output, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            if not readable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            chunk = os.read(output, 4096)
            if not chunk:
                return ""
            self._pending += chunk
        line, self._pending = self._pending.split(b"\n", 1)
        return line.decode(errors="replace")

    def _finish(self) -> None:
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            if pipe is not None:
                pipe.close()
        self._supervisor.wait(_ANSWER_TIMEOUT_S)


_REQUEST_S = 0.5


@contextmanager
def cluster_id_query(bootstrap_servers: str) -> Iterator[Callable[[], str | None]]:
    """Yield a function that returns the cluster's id once a broker there serves clients, else None.

    It requests metadata, which contain a broker once the controller has admitted it. Each call takes at most half a
    second.
    """
    client = AdminClient(
        {
            "bootstrap.servers": bootstrap_servers,
            "log_level": 0,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 100,
        }
    )

    def answer() -> str | None:
        try:
            metadata = client.list_topics(timeout=_REQUEST_S)
        except KafkaException:
            return None
        return str(metadata.cluster_id) if metadata.brokers else None

    yield answer
