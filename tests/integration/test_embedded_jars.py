"""How the broker's jars are fetched, from our own repository: a server that serves the local one."""

import contextlib
import gc
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from jgo.config import GlobalSettings

from halfway.embedded import KAFKA_VERSION, JarsUnavailableError, resolve_jars
from halfway.embedded import java as jars_module

LARGE = f"kafka-clients-{KAFKA_VERSION}.jar"
# jgo does not close the connections of answers other than 200.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
RESOLVE = """
import sys
from halfway.embedded import resolve_jars
for jar in resolve_jars(progress=lambda line: print(line, file=sys.stderr, flush=True)):
    print(jar)
"""


class Repository(http.server.ThreadingHTTPServer):
    """A Maven repository over HTTP; it can refuse a file, cut it short once, or hang in the middle of it."""

    def __init__(self, root: Path, jars: set[str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.jars = jars
        self.root = root
        self.asked: list[str] = []
        self.damaged: set[str] = set()
        self.refused: set[str] = set()
        self.hangs_at: str | None = None
        self.hanging = threading.Event()
        self.go_on = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Repository

    def do_GET(self) -> None:
        name = self.path.rsplit("/", 1)[1]
        self.server.asked.append(name)
        path = self.server.root / self.path.lstrip("/")
        if name in self.server.refused:
            self.server.refused.discard(name)
            self.send_error(503)
            return
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        if name in self.server.damaged:
            self.server.damaged.discard(name)
            content = content[: len(content) // 2]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        half = len(content) // 2
        self.wfile.write(content[:half])
        if name == self.server.hangs_at:
            self.wfile.flush()
            self.server.hanging.set()
            self.server.go_on.wait()
        self.wfile.write(content[half:])

    def handle(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may be killed
            super().handle()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name is given
        pass


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Repository]:
    """Return a repository that fills empty caches; the environment of subprocesses points to it too."""
    jars = resolve_jars()  # so that the local repository contains them
    with Repository(GlobalSettings.load().repo_cache, names(jars)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        settings = tmp_path / "jgo.conf"
        settings.write_text(f"[repositories]\ncentral = {server.url}\n", encoding="utf-8")
        monkeypatch.setenv("JGO_CONFIG_FILE", str(settings))
        monkeypatch.setenv("M2_REPO", str(tmp_path / "m2"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(jars_module, "_RETRY_AFTER_S", 0)
        yield server
        server.go_on.set()
        server.shutdown()
        thread.join()
        gc.collect()


def names(jars: tuple[Path, ...]) -> set[str]:
    return {jar.name for jar in jars}


def test_the_class_path_has_one_version_of_kafka_and_its_log() -> None:
    kafka = {jar for jar in names(resolve_jars()) if jar.startswith("kafka")}
    assert {f"kafka_2.13-{KAFKA_VERSION}.jar", f"kafka-clients-{KAFKA_VERSION}.jar"} <= kafka
    assert [jar for jar in kafka if not jar.endswith(f"-{KAFKA_VERSION}.jar")] == []
    assert any(jar.startswith("log4j-slf4j-impl") for jar in names(resolve_jars()))


def test_empty_caches_are_filled_with_progress_and_full_ones_ask_nobody(repository: Repository, tmp_path: Path) -> None:
    told: list[str] = []
    jars = resolve_jars(progress=told.append)
    assert all(jar.is_relative_to(tmp_path / "m2") for jar in jars)
    assert "Fetching Kafka" in told[0]
    assert f"{len(jars)} files" in told[-1]
    asked = len(repository.asked)
    assert resolve_jars(progress=told.append) == jars
    assert len(repository.asked) == asked


def test_a_jar_that_was_deleted_or_shortened_is_fetched_again(repository: Repository) -> None:
    jars = resolve_jars()
    lost = next(jar for jar in jars if jar.name.startswith("kafka-raft"))
    for lose in (Path.unlink, lambda jar: os.truncate(jar, 1000)):
        lose(lost)
        repository.asked.clear()
        assert resolve_jars() == jars
        assert [name for name in repository.asked if name.endswith(".jar")] == [lost.name]


def test_a_jar_that_arrives_damaged_is_fetched_again(repository: Repository) -> None:
    repository.damaged.add(LARGE)
    told: list[str] = []
    jars = resolve_jars(progress=told.append)
    assert any(f"{LARGE} arrived damaged" in line for line in told)
    assert repository.asked.count(LARGE) == 2
    assert LARGE in names(jars)


@pytest.mark.parametrize("lost", [f"kafka-server-{KAFKA_VERSION}.pom", f"kafka-raft-{KAFKA_VERSION}.jar"])
def test_a_file_that_is_refused_once_leaves_no_gap_in_the_class_path(repository: Repository, lost: str) -> None:
    repository.refused.add(lost)
    assert names(resolve_jars()) == repository.jars
    assert repository.refused == set()


def test_a_process_killed_while_it_fetches_leaves_nothing_half_behind(repository: Repository) -> None:
    repository.hangs_at = LARGE
    with subprocess.Popen(
        [sys.executable, "-c", RESOLVE], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as child:
        assert repository.hanging.wait(300)
        time.sleep(0.2)  # its half of the jar is written
        child.send_signal(signal.SIGKILL)
    repository.hangs_at = None
    repository.go_on.set()
    jars = resolve_jars()
    for jar in jars:
        assert jar.stat().st_size == (repository.root / jar.relative_to(Path(os.environ["M2_REPO"]))).stat().st_size


def test_processes_with_empty_caches_fetch_whole_files_at_once(repository: Repository) -> None:
    """None waits for another one; one of them has half of a jar when the others have finished."""
    repository.hangs_at = LARGE
    with subprocess.Popen([sys.executable, "-c", RESOLVE], stdout=subprocess.PIPE, text=True) as slow:
        assert repository.hanging.wait(300)
        repository.hangs_at = None
        with subprocess.Popen([sys.executable, "-c", RESOLVE], stdout=subprocess.PIPE, text=True) as other:
            jars = resolve_jars()
            answers = [other.communicate(timeout=400)[0]]
        assert [jar for jar in jars if not zipfile.is_zipfile(jar)] == []
        repository.go_on.set()
        answers.append(slow.communicate(timeout=400)[0])
    assert [answer.split() for answer in answers] == [[str(jar) for jar in jars]] * 2


def test_a_version_that_does_not_exist_is_named(repository: Repository) -> None:
    with pytest.raises(JarsUnavailableError, match=r"The jars of Kafka 4\.0\.99 could not be fetched.*\n.*network"):
        resolve_jars("4.0.99")


def test_without_a_network_the_error_says_what_to_do(repository: Repository) -> None:
    Path(os.environ["JGO_CONFIG_FILE"]).write_text("[repositories]\ncentral = http://127.0.0.1:9/\n", encoding="utf-8")
    with pytest.raises(JarsUnavailableError, match=r"refused.*\n.*HTTPS_PROXY"):
        resolve_jars()


def test_what_is_written_down_is_read_without_trust(repository: Repository, tmp_path: Path) -> None:
    jars = resolve_jars()
    written_down = tmp_path / "cache" / "halfway" / f"kafka-{KAFKA_VERSION}.json"
    assert list(json.loads(written_down.read_text(encoding="utf-8"))) == [str(jar) for jar in jars]
    for content in ("", "{}", "[]", "[1]", "1", '{"a.jar": 1}'):
        written_down.write_text(content, encoding="utf-8")
        assert resolve_jars() == jars
