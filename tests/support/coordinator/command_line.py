"""The command `halfway`, run to its end."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.coordinator.process import halfway_command

ENDS_WITHIN_S = 900.0
"""Only what hangs needs this long; the longest plays a story of orders with a broker of its own."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended and what it said."""

    status: int
    out: str
    err: str


async def run(directory: Path, *arguments: str, settings: Mapping[str, str] | None = None) -> Ended:
    """Run `halfway` with arguments and these settings alone."""
    return await run_command(directory, *halfway_command(settings or {}, *arguments))


async def run_command(directory: Path, *command: str) -> Ended:
    """Run any command; it is killed if it does not end."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=directory,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(ENDS_WITHIN_S):
            out, err = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    assert process.returncode is not None
    return Ended(status=process.returncode, out=out.decode(), err=err.decode())
