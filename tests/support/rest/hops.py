"""Counts how often one commit goes from one module into another: `python -m tests.support.rest.hops` shows its way.

The commit comes as an HTTP request, goes to the lane of the ports in memory, and is answered. A hop is a call of a
function in another module than that of the call before it, as somebody reads who follows the code. The ports in memory
count as one module; a comprehension belongs to its function.
"""

import asyncio
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from types import FrameType
from typing import Any

from tests.support.rest.client import HOST, RestWorld

_MEMORY = "halfway.memory"


@dataclass
class Way:
    """The functions that were called, in order: their depth, their module and their qualified name."""

    calls: list[tuple[int, str, str]] = field(default_factory=list)
    _depth: int = 0

    @property
    def modules(self) -> set[str]:
        """The modules that it goes through."""
        return {module for _, module, _ in self.calls}

    @property
    def hops(self) -> int:
        """How often it goes on in another module."""
        modules = [module for _, module, _ in self.calls]
        return sum(one != other for one, other in pairwise(modules))

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call or a return, as `sys.setprofile` reports it."""
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if not module.startswith("halfway.") or code.co_name.startswith("<"):
            return
        if event == "call":
            self.calls.append((self._depth, _MEMORY if module.startswith(_MEMORY) else module, code.co_qualname))
            self._depth += 1
        elif event == "return":
            self._depth = max(0, self._depth - 1)  # one may have been entered before the first call was noted


async def way_of_a_commit() -> Way:
    """Follow one commit on a coordinator that has done a few."""
    async with RestWorld() as world:
        await world.put_shop()
        for _ in range(3):
            assert (await world.end(await world.prepared(), "commit")).status == 200
        transaction, body, way = await world.prepared(), b'{"outcome":"commit"}', Way()
        head = (
            f"POST /v1/transactions/{transaction}/end HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(HOST, world.port)
        writer.write(f"GET /v1/groups HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")  # the connection is there; what the commit adds is counted
        sys.setprofile(way.note)
        try:
            writer.write(head.encode() + body)  # in one piece: it is read in one
            answer = await reader.read()
        finally:
            sys.setprofile(None)
            writer.close()
        answer = answer[answer.index(b"HTTP/1.1 ") :]
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        return way


def main() -> None:
    """Print the way, each hop with a star."""
    way = asyncio.run(way_of_a_commit())
    before = ""
    for depth, module, name in way.calls:
        print(f"{'*' if module != before else ' '} {'  ' * depth}{module.removeprefix('halfway.')} {name}")  # noqa: T201
        before = module
    print(f"{len(way.modules)} modules, {way.hops} hops")  # noqa: T201


if __name__ == "__main__":
    main()
