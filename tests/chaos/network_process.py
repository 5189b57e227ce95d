"""A network in its own process, so that the load of the harness does not slow it down.

`python -m tests.chaos.network_process PORTS` runs the commands on its standard input until that ends; PORTS are pairs
`port:target`. A line is a command; its answer is how often something was held back or affected.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from pathlib import Path

import uvloop

from tests.chaos.network import Network
from tests.chaos.requests import Meeting

_ROOT = Path(__file__).resolve().parents[2]


class NetworkProcess:
    """The harness's side: the methods of `Network` as coroutines."""

    def __init__(self, ports: Mapping[int, int]) -> None:
        self._ports = ports
        self._process: Process | None = None
        self._one_at_a_time = asyncio.Lock()

    async def start(self) -> None:
        """Start the process, and return when it listens."""
        pairs = [f"{port}:{target}" for port, target in self._ports.items()]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.network_process", *pairs),
            stdin=PIPE,
            stdout=PIPE,
            cwd=_ROOT,
            start_new_session=True,
        )
        await self._order("mend")

    async def stop(self) -> None:
        """End it."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()

    async def cut(self, broker: int | None = None) -> None:
        """Block all traffic, or only that of the broker with this index."""
        targets = list(self._ports.values())
        await self._order("cut" if broker is None else f"cut {targets[broker]}")

    async def mend(self) -> int:
        """Let everything arrive, and return how often something had to wait since the cut."""
        return await self._order("mend")

    async def reset(self) -> None:
        """Break every connection."""
        await self._order("reset")

    async def delay(self, seconds: float) -> None:
        """Delay all traffic by this time."""
        await self._order(f"delay {seconds}")

    async def meet(self, meeting: Meeting) -> None:
        """Arrange the handling of requests of a kind."""
        await self._order(f"meet {meeting.line()}")

    async def met(self) -> int:
        """Return how many requests were affected."""
        return await self._order("met")

    async def let_go(self) -> int:
        """Let every request pass, and return how many were affected."""
        return await self._order("let_go")

    async def _order(self, line: str) -> int:
        async with self._one_at_a_time:
            assert self._process is not None
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(line.encode() + b"\n")
            return int(await self._process.stdout.readline())


async def _obey(ports: Mapping[int, int]) -> None:
    network = Network(ports)
    await network.start()
    loop = asyncio.get_running_loop()
    while order := (await loop.run_in_executor(None, sys.stdin.readline)).split():
        match order:
            case ["cut"]:
                network.cut()
            case ["cut", target]:
                network.cut(int(target))
            case ["meet", *words]:
                network.meet(Meeting.of_words(*words))
            case ["let_go"]:
                network.let_go()
            case ["mend"]:
                network.mend()
            case ["reset"]:
                network.reset()
            case ["delay", seconds]:
                network.delay_s = float(seconds)
        print(network.met if order[0] in ("met", "let_go") else network.held, flush=True)  # noqa: T201  the answer
    await network.stop()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(
            _obey({int(port): int(target) for port, _, target in (pair.partition(":") for pair in sys.argv[1:])})
        )
