"""A coordinator as a process, and probes that call it repeatedly in the background."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final, Self

import msgspec
from aiohttp import web

from bench.figures import metric, percentile
from bench.system.rig import STOP_S, RigError
from halfway.embedded.ports import HOST, pick_port
from halfway.embedded.process import SupervisedProcess

_REQUEST_S: Final = 30.0
_POLL_S: Final = 0.02
_SHOWN: Final = 4_000
_CREDENTIAL: Final = "bench-bench-bench"


class CallResults(msgspec.Struct, frozen=True, kw_only=True):
    """The results of repeated calls: latencies in milliseconds, and how many calls failed."""

    asked: int = 0
    failed: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    worst_ms: float = 0.0

    @classmethod
    def of(cls, times: Sequence[float], failed: int) -> CallResults:
        """Summarise latencies in seconds."""
        ordered = sorted(times)
        at = {share: percentile(ordered, share) * 1000 for share in (0.5, 0.99, 1.0)}
        return cls(asked=len(ordered), failed=failed, p50_ms=at[0.5], p99_ms=at[0.99], worst_ms=at[1.0])


class Instance:
    """`halfway serve` as a process, called over HTTP; it is always killed at the end."""

    def __init__(self, directory: Path, settings: Mapping[str, str], python: Path = Path(sys.executable)) -> None:
        """Start it; `python` is the interpreter that runs `halfway`."""
        self.port = pick_port()
        self.health_port = pick_port({self.port})
        self.log = directory / f"coordinator-{self.port}.log"
        own = {
            "HALFWAY_HOST": HOST,
            "HALFWAY_PORT": str(self.port),
            "HALFWAY_HEALTH_HOST": HOST,
            "HALFWAY_HEALTH_PORT": str(self.health_port),
            "HALFWAY_INSTANCE_URL": f"http://{HOST}:{self.port}",
            "HALFWAY_PEER_CREDENTIAL": _CREDENTIAL,
            "HALFWAY_CHECK_ALSO_NETWORKS": "127.0.0.0/8,::1",
            **settings,
        }
        cleared = [word for name in os.environ if name.startswith("HALFWAY_") for word in ("-u", name)]
        variables = [f"{name}={value}" for name, value in own.items()]
        self.started = time.monotonic()
        self._process = SupervisedProcess(
            ["env", *cleared, *variables, str(python), "-m", "halfway.runtime.cli", "serve"],
            cwd=directory,
            log_path=self.log,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()

    def ready(self, within_s: float) -> float:
        """Wait until it is ready; return the seconds since its start."""
        while True:
            with suppress(OSError, HTTPException):
                if ask(self.health_port, "GET", "/health/ready")[0] == HTTPStatus.OK:
                    return time.monotonic() - self.started
            if self._process.poll() is not None or time.monotonic() - self.started > within_s:
                raise RigError(
                    f"the coordinator did not become ready:\n{self.log.read_text(errors='replace')[-_SHOWN:]}"
                )
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Shut it down."""
        self._process.terminate()
        if self._process.wait(STOP_S) is None:
            raise RigError("the coordinator does not stop")

    def kill(self) -> None:
        """Kill it, as a crash does."""
        self._process.kill()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the log entries of an event."""
        lines = self.log.read_bytes().splitlines()
        return [line for line in map(_decoded, lines) if line.get("event") == name]

    def metric(self, name: str) -> float:
        """Return a metric, summed over its labels."""
        return metric(ask(self.health_port, "GET", "/metrics")[1].decode(), name)


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}


def ask(port: int, method: str, path: str, body: Any = None, *, timeout_s: float = _REQUEST_S) -> tuple[int, bytes]:
    """Send one request on a new connection; return status and body."""
    connection = HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else msgspec.json.encode(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@contextmanager
def repeating(once: Callable[[], bool | None], every_s: float) -> Iterator[Callable[[], CallResults]]:
    """Call `once` repeatedly on a thread; it returns whether it was answered, None if the call does not count."""
    stopped, failed = Event(), [0]
    times: list[float] = []

    def run() -> None:
        while not stopped.is_set():
            started = time.monotonic()
            try:
                answered = once()
            except (OSError, HTTPException):
                answered = False
            if answered is not None:
                times.append(time.monotonic() - started)
                failed[0] += not answered
            stopped.wait(every_s)

    thread = Thread(target=run, daemon=True)
    thread.start()

    def ended() -> CallResults:
        stopped.set()
        thread.join()
        return CallResults.of(times, failed[0])

    try:
        yield ended
    finally:
        stopped.set()
        thread.join()


def liveness_probe(instance: Instance, opened: list[bool]) -> Callable[[], bool | None]:
    """Return a probe of liveness; calls before the port is first open do not count."""

    def once() -> bool | None:
        try:
            answered = ask(instance.health_port, "GET", "/health/live", timeout_s=10)[0] == HTTPStatus.OK
        except ConnectionRefusedError:
            return False if opened[0] else None
        opened[0] = True
        return answered

    return once


def served(instance: Instance) -> set[int]:
    """Return the shards that an instance serves, according to its log."""
    shards: set[int] = set()
    for line in map(_decoded, instance.log.read_bytes().splitlines()):
        if line.get("event") == "shard_acquired":
            shards.add(line["shard"])
        elif line.get("event") == "shard_dropped":
            shards.discard(line["shard"])
    return shards


@contextmanager
def unknown_endpoint() -> Iterator[tuple[str, Callable[[], int]]]:
    """Run a check endpoint that always answers unknown; yield its URL, and a function that counts its requests."""
    port, count, ended = pick_port(), [0], Event()
    ready = Event()

    async def answer(_: web.BaseRequest) -> web.Response:
        count[0] += 1
        return web.json_response({"outcome": "unknown"})

    async def run() -> None:
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.TCPSite(runner, HOST, port).start()
        ready.set()
        await asyncio.to_thread(ended.wait)
        await runner.cleanup()

    thread = Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    ready.wait(_REQUEST_S)
    try:
        yield f"http://{HOST}:{port}/check", lambda: count[0]
    finally:
        ended.set()
        thread.join()
