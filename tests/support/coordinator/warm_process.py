"""A coordinator that is forked instead of started: two thirds of a start's CPU time are imports."""

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import IO, cast

from halfway.embedded.errors import SupervisorError
from halfway.embedded.process import SupervisedProcess

_ROOT = Path(__file__).resolve().parents[3]
_ANSWERS_WITHIN_S = 180


class WarmProcess(SupervisedProcess):
    """`halfway serve` with these variables, forked from this worker's nursery; `faults` is the folder of its faults."""

    def __init__(
        self, environment: Mapping[str, str], *, cwd: Path, log_path: Path, faults: Path | None = None
    ) -> None:
        self._pending = b""
        self._status: int | None = None
        wanted = {"environment": dict(environment), "folder": str(cwd), "faults": faults and str(faults)}
        self._supervisor = cast("subprocess.Popen[bytes]", _Supervisor(json.dumps(wanted).encode(), log_path))
        word, _, value = self._next_line(_ANSWERS_WITHIN_S).partition(" ")
        if word != "pid":
            self._finish()
            raise SupervisorError(f"a coordinator could not be forked: {value or word or f'see {log_path}'}")
        self.pid = int(value)


class _Supervisor:
    """The other side of a forked supervisor, as far as SupervisedProcess needs `subprocess.Popen`."""

    def __init__(self, wanted: bytes, log_path: Path) -> None:
        for_input, write = os.pipe()
        read, for_output = os.pipe()
        self.stdin: IO[bytes] = os.fdopen(write, "wb", 0)
        self.stdout: IO[bytes] = os.fdopen(read, "rb", 0)
        with log_path.open("ab") as log:
            socket.send_fds(_nursery(), [wanted], [for_input, for_output, log.fileno()])
        os.close(for_input)
        os.close(for_output)

    def wait(self, _timeout_s: float) -> None:
        """Return at once: it has told of the end, or is dead."""


@cache
def _nursery() -> socket.socket:
    """Start this worker's nursery."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HALFWAY_")}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.coordinator.nursery"],
            cwd=_ROOT,
            env=environment,
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
        )

    def end() -> None:
        ours.close()
        process.wait(_ANSWERS_WITHIN_S)

    atexit.register(end)
    return ours
