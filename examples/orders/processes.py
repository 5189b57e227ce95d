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
"""Of the repository, from which the examples are imported."""
STOP_WITHIN_S = 40.0
# The first start fetches Kafka's jars.
READY_WITHIN_S = 600.0
UP_WITHIN_S = 60.0


class DemoError(Exception):
    """The demo cannot go on; the message says why and where to look."""


class Process:
    """A child in a session of its own: a Ctrl-C in the terminal reaches only the demo, which stops it in its turn."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        """Keep the command and where its standard error is appended."""
        self._command = command
        self._log = log
        self._secrets: dict[str, str] = {}
        """Variables of its environment; never on its command line, which others can see."""
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, *, stdout: int | IO[bytes]) -> asyncio.subprocess.Process:
        # The coordinator of the demo takes its settings from the demo alone.
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
        """Send SIGKILL, which no process can prepare for, and return when it is gone."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def stop(self) -> None:
        """Ask it to end; kill it where it does not."""
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
            # Also when the waiting itself is cancelled nothing stays behind.
            if self.running:
                self._process.kill()

    def last_line(self) -> str:
        """Return the last line of the log that has something in it."""
        with suppress(OSError):
            lines = self._log.read_text(errors="replace").splitlines()
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""

    def failed(self, what: str) -> DemoError:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:]) if self._log.exists() else ""
        return DemoError(f"{what}; the end of {self._log}:\n{tail}")


class HalfwayDev(Process):
    """`halfway dev`: a Kafka broker and the coordinator, with data that is thrown away."""

    def __init__(self, directory: Path, topics: Sequence[str]) -> None:
        """Keep the topics that are to be created."""
        self._program = str(Path(sys.executable).with_name("halfway"))
        created = [f"--topic={topic}" for topic in topics]
        super().__init__(
            [self._program, "dev", "--json", "--with-parent", "--port=0", "--health-port=0", *created],
            directory / "halfway.log",
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def ready(self, progress: Callable[[str], None]) -> None:
        """Start, and return when both answer: `url` and `bootstrap_servers` are known then."""
        process = await self.start(stdout=asyncio.subprocess.PIPE)
        if process.stdout is None:
            raise self.failed("halfway dev has no standard output")
        line = asyncio.ensure_future(process.stdout.readline())
        try:
            async with asyncio.timeout(READY_WITHIN_S):
                while not (await asyncio.wait({line}, timeout=0.3))[0]:
                    progress(_told(self.last_line()))
            found = json.loads(await line)
        except (TimeoutError, ValueError):
            raise self.failed("halfway dev did not get ready") from None
        finally:
            line.cancel()
        self.url: str = found["url"]
        self.bootstrap_servers: str = found["bootstrap_servers"]

    async def ask_for_keys(self) -> None:
        """Have it ask callers for keys from its start on; `operator_key` is the first one."""
        self.operator_key = (await self._command_of("keys", "generate")).strip()
        self._secrets = {"HALFWAY_MASTER_SECRET": token_hex(32), "HALFWAY_OPERATOR_KEY": self.operator_key}

    async def admit(self, group: str, check_url: str, topics: Sequence[str]) -> str:
        """Register a group and make its key, as a platform team does."""
        granted = [f"--topic={topic}" for topic in topics]
        await self._as_operator("groups", "put", group, f"--check-url={check_url}", *granted)
        made: str = json.loads(await self._as_operator("keys", "create", "group", group, "--json"))["key"]
        return made

    async def end_as_operator(self, transaction_id: str, outcome: str) -> None:
        """Run `halfway transactions end`, as an operator at a terminal does; one that has ended already stays so."""
        with suppress(DemoError):
            await self._as_operator("transactions", "end", transaction_id, outcome)

    async def _as_operator(self, *arguments: str) -> str:
        return await self._command_of(*arguments, "--url", self.url, HALFWAY_TOKEN=self.operator_key)

    async def _command_of(self, *arguments: str, **variables: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *(self._program, *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=dict(os.environ) | variables,
        )
        try:
            told, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            raise self.failed(f"halfway {arguments[0]} {arguments[1]} failed")
        return told.decode()


class OrderServiceProcess(Process):
    """The order service on one port and one database for the whole run, however often it starts."""

    def __init__(self, directory: Path, session: aiohttp.ClientSession) -> None:
        """Choose the port."""
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
        """Start with a key for each group, and return when it takes requests."""
        self._secrets = {"ORDERS_KEYS": json.dumps(dict(keys))}
        self._command = [
            sys.executable,
            "-m",
            "examples.orders.with_parent",
            f"--port={self._port}",
            f"--database={self.database}",
            f"--halfway={halfway_url}",
        ]
        await self._up()

    async def kill_and_restart(self, _: str) -> None:
        """Kill it and bring it back a second later, on the same port and the same database."""
        async with self._restarting:
            await self.kill()
            self.kills += 1
            await asyncio.sleep(1)
            await self._up()

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        """Call it; aiohttp.ClientError where it is gone."""
        async with self._session.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def _up(self) -> None:
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
        raise self.failed("the order service did not get ready")


def _told(line: str) -> str:
    """Return a line of the log for a person: what is structured is the coordinator's own, once the broker runs."""
    return "halfway starts" if line.startswith("{") else line[:100]
