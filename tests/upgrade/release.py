"""An earlier release: checked out of this repository's history, and installed from its own lock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def installed(commit: str, directory: Path) -> Iterator[Path]:
    """Give the command `halfway` of the release that this commit is; subprocess.CalledProcessError without it."""
    checkout, environment = directory / "release", directory / "release-venv"
    _run("git", "-C", str(_ROOT), "worktree", "add", "--quiet", "--detach", str(checkout), commit)
    try:
        uv = (sys.executable, "-m", "uv")
        _run(*uv, "venv", "--quiet", "--python", sys.executable, str(environment))
        install = (*uv, "pip", "install", "--quiet", "--python", str(environment))
        _run(*install, "--no-deps", "--require-hashes", "--requirement", str(checkout / "requirements" / "runtime.txt"))
        _run(*install, "--no-deps", str(checkout))
        yield environment / "bin" / "halfway"
    finally:
        _run("git", "-C", str(_ROOT), "worktree", "remove", "--force", str(checkout))


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
