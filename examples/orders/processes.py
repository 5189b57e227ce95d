"""The processes of the demo: halfway with its Kafka broker, and the order service."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import IO, Any, Self

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
"""The root of the repository, from which the examples are imported."""
STOP_WITHIN_S = 40.0
# The first start downloads Kafka's jars.
READY_WITHIN_S = 600.0
UP_WITHIN_S = 60.0


class DemoError(Exception):
    """The demo cannot continue; the message says why and which log to read."""


class Process:
    """A child process in its own session, so that Ctrl-C reaches only the demo, which then stops its children."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        """Store the command, and the file to which its standard error is appended."""
        self._command = command
        self._log = log
        self._secrets: dict[str, str] = {}
        """Environment variables with secrets, which must not be on the command line: other users can read that."""
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, *, stdout: int | IO[bytes]) -> asyncio.subprocess.Process:
        # The coordinator of the demo gets its settings only from the demo.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HALFWAY_")}
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=stdout,
                stderr=log,
                env=environment | self._secrets,
                cwd=ROOT,
                start_new_session=True,
            )
        return self._process

    async def kill(self) -> None:
        """Send SIGKILL, which a process cannot handle, and wait until the process has ended."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def stop(self) -> None:
        """Terminate the process, or kill it if it does not end."""
        if not self.running or self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_WITHIN_S):
                await self._process.wait()
        except TimeoutError:
            await self.kill()
        finally:
            # Leave no process behind, even if the wait is cancelled.
            if self.running:
                self._process.kill()

    def last_line(self) -> str:
        """Return the last line of the log that is not blank."""
        with suppress(OSError):
            lines = self._log.read_text(errors="replace").splitlines()
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""

    def failed(self, what: str) -> DemoError:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:]) if self._log.exists() else ""
        return DemoError(f"{what}; the end of {self._log}:\n{tail}")


class HalfwayDev(Process):
    """`halfway dev`: a Kafka broker and the coordinator, with temporary data."""

    def __init__(self, directory: Path, topics: Sequence[str]) -> None:
        """Take the topics to create."""
        self._program = str(Path(sys.executable).with_name("halfway"))
        topic_options = [f"--topic={topic}" for topic in topics]
        super().__init__(
            [self._program, "dev", "--json", "--with-parent", "--port=0", "--health-port=0", *topic_options],
            directory / "halfway.log",
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def ready(self, progress: Callable[[str], None]) -> None:
        """Start, wait until both answer, and set their addresses."""
        process = await self.start(stdout=asyncio.subprocess.PIPE)
        if process.stdout is None:
            raise self.failed("halfway dev has no standard output")
        line = asyncio.ensure_future(process.stdout.readline())
        try:
            async with asyncio.timeout(READY_WITHIN_S):
                while not (await asyncio.wait({line}, timeout=0.3))[0]:
                    progress(_progress_text(self.last_line()))
            ready = json.loads(await line)
        except (TimeoutError, ValueError):
            raise self.failed("halfway dev did not become ready") from None
        finally:
            line.cancel()
        self.url: str = ready["url"]
        self.health_url: str = ready["health_url"]
        self.bootstrap_servers: str = ready["bootstrap_servers"]

    async def require_keys(self) -> None:
        """Turn access control on, before the start. `operator_key` is the first operator's key."""
        self.operator_key = (await self._run_command("keys", "generate")).strip()
        self._secrets = {"HALFWAY_MASTER_SECRET": token_hex(32), "HALFWAY_OPERATOR_KEY": self.operator_key}

    async def admit(self, group: str, check_url: str, topics: Sequence[str]) -> str:
        """Register a group and create its key, as a platform team does."""
        topic_options = [f"--topic={topic}" for topic in topics]
        await self._as_operator("groups", "put", group, f"--check-url={check_url}", *topic_options)
        key: str = json.loads(await self._as_operator("keys", "create", "group", group, "--json"))["key"]
        return key

    async def end_as_operator(self, transaction_id: str, outcome: str) -> None:
        """Run `halfway transactions end`, as an operator does. A transaction that has already ended is not changed."""
        with suppress(DemoError):
            await self._as_operator("transactions", "end", transaction_id, outcome)

    async def _as_operator(self, *arguments: str) -> str:
        return await self._run_command(*arguments, "--url", self.url, HALFWAY_TOKEN=self.operator_key)

    async def _run_command(self, *arguments: str, **variables: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *(self._program, *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=dict(os.environ) | variables,
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            raise self.failed(f"halfway {arguments[0]} {arguments[1]} failed")
        return output.decode()


class OrderServiceProcess(Process):
    """The order service. It has the same port and database after every restart."""

    def __init__(self, directory: Path, session: aiohttp.ClientSession) -> None:
        """Choose a free port."""
        self.database = directory / "orders.sqlite"
        self.kills = 0
        self._session = session
        self._restarting = asyncio.Lock()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        super().__init__([], directory / "service.log")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def serve(self, halfway_url: str, keys: Mapping[str, str]) -> None:
        """Start with a key for each group, and wait until it accepts requests."""
        self._secrets = {"ORDERS_KEYS": json.dumps(dict(keys))}
        self._command = [
            sys.executable,
            "-m",
            "examples.orders.with_parent",
            f"--port={self._port}",
            f"--database={self.database}",
            f"--halfway={halfway_url}",
        ]
        await self._start_and_wait()

    async def kill_and_restart(self, _: str) -> None:
        """Kill it, and restart it a second later with the same port and database."""
        async with self._restarting:
            await self.kill()
            self.kills += 1
            await asyncio.sleep(1)
            await self._start_and_wait()

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        """Call the service; raises aiohttp.ClientError if it is down."""
        async with self._session.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def _start_and_wait(self) -> None:
        process = await self.start(stdout=asyncio.subprocess.DEVNULL)
        try:
            async with asyncio.timeout(UP_WITHIN_S):
                while process.returncode is None:
                    with suppress(aiohttp.ClientError):
                        async with self._session.get(self.url):
                            return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pass
        raise self.failed("the order service did not become ready")


def _progress_text(line: str) -> str:
    """Return a line of the log for display. JSON lines are from the coordinator, which starts after the broker."""
    return "halfway starts" if line.startswith("{") else line[:100]
