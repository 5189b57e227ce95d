"""Forks coordinators: a program of its own, one for each worker of the tests, that has imported all of `halfway serve`.

Standard input is a socket whose other end only the worker holds: when that closes, this process and, by their
supervisors, all coordinators end. Each packet is one coordinator as JSON, with the ends of its supervisor's pipes and
its log as file descriptors; the supervisor is that of `halfway.embedded`, forked too.

Nothing here may start a thread before a fork: imports only, and the document that each coordinator would make.
"""

import gc
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from halfway.app.cli import main as cli
from halfway.embedded import supervisor
from halfway.http.handlers import openapi
from tests.faults.injection import Injection
from tests.faults.plan import Faults

MOST_BYTES = 1024 * 1024
_STARTED_WITH = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP)


class _Child:
    """A forked process, as far as the supervisor needs `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        return self._status if self._status is not None else self._waited(os.WNOHANG)

    def wait(self) -> int | None:
        return self._status if self._status is not None else self._waited(0)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _waited(self, options: int) -> int | None:
        pid, status = os.waitpid(self.pid, options)
        if pid:
            self._status = os.waitstatus_to_exitcode(status)
        return self._status


def main() -> None:
    """Fork a supervisor for each packet until the worker is gone."""
    worker = socket.socket(fileno=0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors that have ended leave nothing behind
    openapi.encoded()
    gc.collect()
    gc.freeze()
    while True:
        packet, files, _, _ = socket.recv_fds(worker, MOST_BYTES, 3)
        if not packet:
            return
        nursery = os.getpid()
        if os.fork() == 0:
            worker.detach()
            _supervise(json.loads(packet), files, nursery)
            return
        for file in files:
            os.close(file)


def _supervise(wanted: dict[str, Any], files: list[int], nursery: int) -> None:
    """Be the supervisor of one coordinator; return when it has ended, or, in the coordinator, when it ends."""
    os.setsid()
    for place, file in enumerate(files):
        os.dup2(file, place)
    os.closerange(3, max(files) + 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def run(_command: list[str], _log_path: str) -> _Child:
        if pid := os.fork():
            return _Child(pid)
        _serve(wanted)
        sys.exit()

    supervisor._run = run  # type: ignore[assignment]
    supervisor.main([str(nursery), "", ""])


def _serve(wanted: dict[str, Any]) -> None:
    """Be the coordinator: as `halfway serve` in this folder and with just these variables."""
    supervisor._die_with_supervisor()
    signal.set_wakeup_fd(-1)
    for number in _STARTED_WITH:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    os.closerange(3, min(MOST_BYTES, os.sysconf("SC_OPEN_MAX")))
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    sys.argv = ["halfway", "serve"]
    if wanted["faults"] is not None:
        Injection(Faults(Path(wanted["faults"]))).install()
    cli.main()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
