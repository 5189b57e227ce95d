"""The coordinator as users run it: `halfway serve`, a process of its own, set up by its environment."""

import asyncio
import os
import signal
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Protocol, Self
from uuid import uuid4

from halfway.embedded.broker import HOST, pick_port
from halfway.embedded.process import SupervisedProcess
from tests.support.brokers.members import remove_members
from tests.support.canary import know_secrets
from tests.support.coordinator.warm_process import WarmProcess

READY_WITHIN_S = 180.0
EXIT_WITHIN_S = 180.0
_ASK_AGAIN_S = 0.05

QUICK: Mapping[str, str] = {
    "HALFWAY_SHARDS": "2",  # few start quickly
    # On a slow machine one that lives, or its broker, is silent for seconds, and would lose its shards in a test.
    "HALFWAY_SESSION_TIMEOUT_S": "15",
    "HALFWAY_REQUEST_TIMEOUT_S": "30",
    "HALFWAY_MIN_CHECK_INTERVAL_S": "0.05",
    "HALFWAY_CHECK_TIMEOUT_S": "4",
    "HALFWAY_LEASE_S": "2",
    "HALFWAY_CHECK_ALSO_NETWORKS": "127.0.0.0/8,::1",
    "HALFWAY_DRAIN_S": "0",
}
"""Settings under which a test need not wait for what takes minutes in production."""


class KillableProcess:
    """A process that a test can kill and freeze, once it is started."""

    paused = False
    """Whether it is frozen."""
    _process: SupervisedProcess | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """End it as a crash does (SIGKILL)."""
        self.paused = False
        if self._process is not None:
            self._process.kill()

    def pause(self) -> None:
        """Freeze it (SIGSTOP)."""
        assert self._process is not None
        self._process.pause()
        self.paused = True

    def resume(self) -> None:
        """Let a frozen one go on (SIGCONT)."""
        assert self._process is not None
        self._process.resume()
        self.paused = False


class CoordinatorProcess(KillableProcess):
    """One coordinator that can be stopped, killed and started again with its topics and its ports.

    It ends with the tests, whatever happens to them. `settings` are environment variables over `QUICK`.
    """

    launched: ClassVar[list["CoordinatorProcess"]] = []
    """Those whose logs are still to be looked through for what must not be in them."""
    warm = True
    """Whether it is forked from a process that has imported it. Where the start itself is the subject it is not."""

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
        self._looked_through = 0
        self._shown = b""
        self.alone = True
        """Whether no other instance shares its topics: then its successor need not wait for the end of its session."""
        directory.mkdir(parents=True, exist_ok=True)
        self.log_path.touch()

    @property
    def url(self) -> str:
        scheme = "https" if "HALFWAY_TLS_CERTIFICATE_FILE" in self.settings else "http"
        return f"{scheme}://{HOST}:{self.port}"

    @property
    def health_url(self) -> str:
        scheme = "https" if self.settings.get("HALFWAY_HEALTH_TLS") == "true" else "http"
        return f"{scheme}://{HOST}:{self.health_port}"

    @property
    def log(self) -> str:
        """Everything that it has written so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def fresh_words(self) -> bytes:
        """Give what it has logged since this was asked last, and what it showed to everybody before it was closed."""
        with self.log_path.open("rb") as file:
            file.seek(self._looked_through)
            fresh = file.read()
        self._looked_through += len(fresh)
        return fresh + self._shown

    def topic(self, kind: str) -> str:
        """Give the name of an internal topic: `half`, `op`, `parked`, `groups` or `owners`."""
        return self.prefix + kind

    def launch(self, **settings: str) -> None:
        """Start the process and return at once; `settings` hold from this start on.

        If it was killed its successor is assigned its shards at once, unless others share them.
        """
        assert not self.running
        if self.alone and self._process is not None and self._process.poll() == -signal.SIGKILL:
            remove_members(self.settings["HALFWAY_KAFKA__BOOTSTRAP_SERVERS"], self.topic("members"))
        self.settings |= settings
        know_secrets(self.settings)
        if self not in self.launched:
            self.launched.append(self)
        self._process = self._forked() if self.warm and "PYTHONPATH" not in self.settings else self._started()

    def _started(self) -> SupervisedProcess:
        return SupervisedProcess(halfway_command(self.settings, "serve"), cwd=self.directory, log_path=self.log_path)

    def _forked(self) -> SupervisedProcess:
        return WarmProcess(clean_environment(self.settings), cwd=self.directory, log_path=self.log_path)

    def start(self, **settings: str) -> Self:
        """Start the process and return it once it says that it is ready."""
        self.launch(**settings)
        self.wait_until_ready()
        return self

    def wait_until_ready(self, within_s: float = READY_WITHIN_S) -> None:
        deadline = time.monotonic() + within_s
        while not self._ready():
            if not self.running:
                raise AssertionError(f"the coordinator ended with {self.exit_status()}:\n{self.log[-8000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"the coordinator is not ready after {within_s:g} s:\n{self.log[-8000:]}")
            time.sleep(_ASK_AGAIN_S)

    def _ready(self) -> bool:
        return self._got(f"{self.health_url}/health/ready") is not None

    def _got(self, url: str, *, key: str | None = None) -> bytes | None:
        """Give what is at one of its own URLs, None for any other status than 200."""
        vouching = None
        if url.startswith("https:"):  # it reads all certificates of the system, for 20 ms of CPU each time
            vouching = ssl.create_default_context(cafile=self.settings.get("HALFWAY_PEER_CA_FILE"))
        asked = urllib.request.Request(url)  # noqa: S310  our own
        if key is not None:
            asked.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(asked, timeout=5, context=vouching) as answer:  # noqa: S310  our own
                return bytes(answer.read()) if answer.status == 200 else None
        except (urllib.error.URLError, OSError):
            return None

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

    def close(self) -> None:
        """End it if it runs; its metrics and its OpenAPI document are among `fresh_words` then."""
        if not self.running:
            return
        key = self.settings.get("HALFWAY_OPERATOR_KEY")
        if not self.paused and (metrics := self._got(f"{self.health_url}/metrics", key=key)) is not None:
            self._shown = metrics + (self._got(f"{self.url}/openapi.json", key=key) or b"")
        self.kill()


class NewCoordinator(Protocol):
    """Makes coordinators, not yet started, that end with the test."""

    def __call__(
        self, settings: Mapping[str, str] | None = None, *, bootstrap_servers: str | None = None
    ) -> CoordinatorProcess: ...


def clean_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Give these variables beside our own environment, without ours of halfway."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HALFWAY_")} | dict(settings)


def halfway_command(settings: Mapping[str, str], *arguments: str, module: str = "halfway.app.cli") -> list[str]:
    """Give the command line that runs `halfway` with these settings, and none of our own environment's."""
    ours = [name for name in os.environ if name.startswith("HALFWAY_")]
    unset = [word for name in ours for word in ("-u", name)]
    return [
        *("env", *unset, *(f"{name}={value}" for name, value in settings.items())),
        *(sys.executable, "-m", module, *arguments),
    ]
