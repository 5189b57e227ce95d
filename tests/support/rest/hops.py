"""Counts how often one commit changes from one module to another: `python -m tests.support.rest.hops` prints its path.

The commit arrives as an HTTP request, passes the lane of the ports in memory, and is answered. A hop is a call of a
function in another module than the previous call, as a reader of the code would follow it. The ports in memory
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
class CallPath:
    """The called functions in order: depth, module and qualified name."""

    calls: list[tuple[int, str, str]] = field(default_factory=list)
    _depth: int = 0

    @property
    def modules(self) -> set[str]:
        """The modules on the path."""
        return {module for _, module, _ in self.calls}

    @property
    def hops(self) -> int:
        """How often the module changes."""
        modules = [module for _, module, _ in self.calls]
        return sum(one != other for one, other in pairwise(modules))

    def record(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call or a return, as `sys.setprofile` reports it."""
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if not module.startswith("halfway.") or code.co_name.startswith("<"):
            return
        if event == "call":
            self.calls.append((self._depth, _MEMORY if module.startswith(_MEMORY) else module, code.co_qualname))
            self._depth += 1
        elif event == "return":
            self._depth = max(0, self._depth - 1)  # a function may have been entered before the first recorded call


async def path_of_commit() -> CallPath:
    """Return the path of one commit, on a coordinator that has done a few before."""
    async with RestWorld() as world:
        await world.put_shop()
        for _ in range(3):
            assert (await world.end(await world.prepared(), "commit")).status == 200
        transaction, body, path = await world.prepared(), b'{"outcome":"commit"}', CallPath()
        head = (
            f"POST /v1/transactions/{transaction}/end HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(HOST, world.port)
        writer.write(f"GET /v1/groups HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")  # the connection exists, so only the commit is counted
        sys.setprofile(path.record)
        try:
            writer.write(head.encode() + body)  # in one write, so that the server reads it at once
            answer = await reader.read()
        finally:
            sys.setprofile(None)
            writer.close()
        answer = answer[answer.index(b"HTTP/1.1 ") :]
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        return path


def main() -> None:
    """Print the path, with a star at each hop."""
    path = asyncio.run(path_of_commit())
    before = ""
    for depth, module, name in path.calls:
        print(f"{'*' if module != before else ' '} {'  ' * depth}{module.removeprefix('halfway.')} {name}")  # noqa: T201
        before = module
    print(f"{len(path.modules)} modules, {path.hops} hops")  # noqa: T201


if __name__ == "__main__":
    main()
