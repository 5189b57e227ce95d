"""The coordinator as users run it: `halfway serve`, a process of its own, set up by its environment."""

import asyncio
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from halfway.embedded.ports import HOST, pick_port
from halfway.embedded.process import SupervisedProcess

READY_WITHIN_S = 60.0
EXIT_WITHIN_S = 60.0
_ASK_AGAIN_S = 0.05

QUICK: Mapping[str, str] = {
    # Few shards start quickly; a short session lets a killed coordinator's successor start quickly.
    "HALFWAY_SHARDS": "2",
    "HALFWAY_SESSION_TIMEOUT_S": "2",
    "HALFWAY_SCAN_INTERVAL_S": "0.1",
    "HALFWAY_MIN_CHECK_INTERVAL_S": "0.05",
    "HALFWAY_CHECK_TIMEOUT_S": "2",
    "HALFWAY_LEASE_S": "2",
    "HALFWAY_LOG_FORMAT": "json",
}
"""Settings under which a test need not wait for what takes minutes in production."""


class CoordinatorProcess:
    """One coordinator that can be stopped, killed and started again with its topics and its ports.

    It ends with the tests, whatever happens to them. `settings` are environment variables over `QUICK`.
    """

    def __init__(self, bootstrap_servers: str, directory: Path, settings: Mapping[str, str] | None = None) -> None:
        port = pick_port()
        self.prefix = f"_t{uuid4().hex[:12]}."
        self.directory = directory
        self.log_path = directory / "coordinator.log"
        self.port = port
        self.health_port = pick_port({port})
        self.settings = {
            **QUICK,
            "HALFWAY_KAFKA__BOOTSTRAP_SERVERS": bootstrap_servers,
            "HALFWAY_KAFKA_PREFIX": self.prefix,
            "HALFWAY_HOST": HOST,
            "HALFWAY_PORT": str(self.port),
            "HALFWAY_HEALTH_HOST": HOST,
            "HALFWAY_HEALTH_PORT": str(self.health_port),
            **(settings or {}),
        }
        self._process: SupervisedProcess | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self.log_path.touch()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def health_url(self) -> str:
        return f"http://{HOST}:{self.health_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """Everything that it has written so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def topic(self, kind: str) -> str:
        """Give the name of an internal topic: `half`, `op`, `parked`, `groups` or `owners`."""
        return self.prefix + kind

    def launch(self, **settings: str) -> None:
        """Start the process and return at once; `settings` hold from this start on."""
        assert not self.running
        self.settings |= settings
        self._process = SupervisedProcess(self._command(), cwd=self.directory, log_path=self.log_path)

    def _command(self) -> list[str]:
        return halfway_command(self.settings, "serve")

    def start(self, **settings: str) -> None:
        """Start the process and return once it says that it is ready."""
        self.launch(**settings)
        self.wait_until_ready()

    def wait_until_ready(self, within_s: float = READY_WITHIN_S) -> None:
        deadline = time.monotonic() + within_s
        while not self._ready():
            if not self.running:
                raise AssertionError(f"the coordinator ended with {self.exit_status()}:\n{self.log[-8000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"the coordinator is not ready after {within_s:g} s:\n{self.log[-8000:]}")
            time.sleep(_ASK_AGAIN_S)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.health_url}/health/ready", timeout=5) as answer:  # noqa: S310  our own
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def exit_status(self, within_s: float = EXIT_WITHIN_S) -> int:
        """Wait for the end, and return its exit status (minus the signal's number if one killed it)."""
        assert self._process is not None
        status = self._process.wait(within_s)
        assert status is not None, f"the coordinator still runs after {within_s:g} s:\n{self.log[-8000:]}"
        return status

    async def exited(self, within_s: float = EXIT_WITHIN_S) -> int:
        """Give the exit status as `exit_status` does, and let the event loop go on meanwhile."""
        assert self._process is not None
        deadline = time.monotonic() + within_s
        while self._process.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110  the process sets no event
            await asyncio.sleep(_ASK_AGAIN_S)
        return self.exit_status(0)

    def terminate(self) -> None:
        """Send SIGTERM and return at once."""
        assert self._process is not None
        self._process.terminate()

    def stop(self) -> int:
        """End it in order (SIGTERM) and give its exit status."""
        self.terminate()
        return self.exit_status()

    def kill(self) -> None:
        """End it as a crash does (SIGKILL)."""
        assert self._process is not None
        self._process.kill()

    def pause(self) -> None:
        """Freeze it (SIGSTOP)."""
        assert self._process is not None
        self._process.pause()

    def resume(self) -> None:
        """Let a frozen one go on (SIGCONT)."""
        assert self._process is not None
        self._process.resume()

    def close(self) -> None:
        """End it if it runs."""
        if self.running:
            self.kill()


class NewCoordinator(Protocol):
    """Makes coordinators, not yet started, that end with the test."""

    def __call__(
        self, settings: Mapping[str, str] | None = None, *, bootstrap_servers: str | None = None
    ) -> CoordinatorProcess: ...


def halfway_command(settings: Mapping[str, str], *arguments: str, module: str = "halfway.runtime.cli") -> list[str]:
    """Give the command line that runs `halfway` with these settings, and none of our own environment's."""
    ours = [name for name in os.environ if name.startswith("HALFWAY_")]
    unset = [word for name in ours for word in ("-u", name)]
    return [
        *("env", *unset, *(f"{name}={value}" for name, value in settings.items())),
        *(sys.executable, "-m", module, *arguments),
    ]
