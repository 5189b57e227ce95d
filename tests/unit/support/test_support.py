"""The support of the tests: ports, brokers, skips, and what looks for secrets."""

import asyncio
import base64
import gc
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

import pytest

from halfway.protocol.keys import RANDOM_BYTES, key_text
from halfway.protocol.principal import PrincipalKind
from tests.support.brokers.container import container_properties
from tests.support.brokers.fixtures import run_kafka
from tests.support.brokers.keeper import address_of, kept_kafka
from tests.support.canary import PAYLOAD, know_secrets, leaks_in
from tests.support.coordinator.rest_client import Answer
from tests.support.ports import take_slice
from tests.support.waiting import until_true

SECRET = "canary of test_canary: ü/1"
KEY = key_text(PrincipalKind.GROUP, bytes(range(RANDOM_BYTES)))


@pytest.mark.parametrize(
    "written",
    [
        SECRET.encode(),
        quote(SECRET, safe="").encode(),
        SECRET.encode().hex().upper().encode(),
        base64.b64encode(b"a" + SECRET.encode()),
        base64.urlsafe_b64encode(b"ab" + SECRET.encode() + b"c"),
    ],
    ids=["as it is", "quoted", "hexadecimal", "base64", "base64 for URLs"],
)
def test_a_coordinators_secret_is_found_however_it_is_written(written: bytes) -> None:
    know_secrets({"HALFWAY_MASTER_SECRET": SECRET, "HALFWAY_PEER_CREDENTIAL": "", "HALFWAY_LOG_LEVEL": "json-lines"})
    assert leaks_in(b'{"detail": "' + written + b'"}') == [f"HALFWAY_MASTER_SECRET: {SECRET}"]
    assert leaks_in(b'{"format": "json-lines"}') == []


@pytest.mark.parametrize("text", [KEY, "whsec_" + "A1b2" * 8], ids=["a key", "a check secret"])
def test_what_looks_like_a_secret_is_found_without_being_known(text: str) -> None:
    assert leaks_in(f"log {text}".encode()) != []


@pytest.mark.parametrize(
    "status, body",
    [
        (422, {"detail": f"value: {PAYLOAD}"}),
        (500, f"Traceback: {PAYLOAD}"),
        (200, {"prepare": [{"status": 201}, {"status": 422, "problem": {"detail": [PAYLOAD]}}], "end": []}),
        (200, {"end": [{"status": 409, "problem": {"detail": KEY}}]}),
    ],
    ids=["a problem", "plain text", "an item of a batch", "a key in an item"],
)
def test_no_answer_is_taken_whose_problem_tells_a_payload_or_a_key(status: int, body: object) -> None:
    with pytest.raises(AssertionError, match=r"payload|looks like a secret"):
        Answer(status=status, body=body, headers={})


def test_a_broker_that_runs_already_is_taken_as_it_is() -> None:
    with run_kafka("kafka-1:9092,kafka-2:9092") as kafka:
        assert kafka.bootstrap_servers == "kafka-1:9092,kafka-2:9092"


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of the Docker client that finds no engine
def test_without_a_docker_engine_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(RuntimeError, match="needs a running Docker engine"), run_kafka("testcontainers"):
        pass
    gc.collect()


def test_in_a_container_the_broker_listens_outside_and_advertises_where_it_is_reached() -> None:
    lines = container_properties("docker:32768").splitlines()
    assert "listeners=PLAINTEXT://0.0.0.0:9092,CONTROLLER://127.0.0.1:9093" in lines
    assert "advertised.listeners=PLAINTEXT://docker:32768" in lines
    assert "log.dirs=/tmp/halfway-data" in lines


ROOT = Path(__file__).parents[3]
ANOTHER_WORKER = """
import sys
from tests.support.brokers.keeper import kept_kafka
with kept_kafka("kafka-2:9092", sys.argv[1]) as bootstrap_servers:
    print(bootstrap_servers, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def kept() -> str:
    return uuid4().hex


def wait_for_end(kept: str) -> None:
    asyncio.run(until_true(lambda: not address_of(kept).exists(), "the keeper ends"))


def test_all_workers_share_the_kafka_of_the_first(kept: str) -> None:
    with kept_kafka("kafka-1:9092", kept) as first:
        with kept_kafka("kafka-2:9092", kept) as second:
            assert first == second == "kafka-1:9092"
        with kept_kafka("kafka-2:9092", kept) as third:
            assert third == "kafka-1:9092"
    wait_for_end(kept)
    with kept_kafka("kafka-2:9092", kept) as later:
        assert later == "kafka-2:9092"
    wait_for_end(kept)


def test_it_ends_with_a_worker_that_is_killed(kept: str) -> None:
    command = [sys.executable, "-c", ANOTHER_WORKER, kept]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"kafka-2:9092\n"
        assert address_of(kept).exists()
        worker.kill()
        wait_for_end(kept)


TESTS = """
import pytest

@pytest.fixture
def kafka(): return "a broker"

@pytest.fixture
def topic(kafka): return "a topic"

@pytest.fixture(params=["memory", "kafka"])
def backend(request): return request.getfixturevalue("kafka") if request.param == "kafka" else None

@pytest.fixture
def hidden(request): return request.getfixturevalue("kafka")

def test_of_code(): pass
def test_of_the_broker(topic): pass
def test_of_both(backend): pass
def test_that_hides_it(hidden): pass
"""


def test_what_asks_for_a_broker_by_a_fixture_or_a_parameter_is_left_out(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is asked for in another way is an error."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess("-p", "tests.support.no_broker", "--no-broker")
    assert result.parseoutcomes() == {"passed": 2, "deselected": 2, "errors": 1}


ANOTHER_RUN = """
import sys
from pathlib import Path
from tests.support.ports import take_slice
print(*take_slice(Path(sys.argv[1])))
"""


def another_run(folder: Path) -> set[int]:
    """Give the ports that another process would pick from."""
    said = subprocess.run(
        [sys.executable, "-c", ANOTHER_RUN, folder], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return {int(port) for port in said.stdout.split()}


def test_each_process_has_a_slice_of_its_own_until_it_ends(tmp_path: Path) -> None:
    mine, its = set(take_slice(tmp_path)), another_run(tmp_path)
    assert mine.isdisjoint(its)
    assert another_run(tmp_path) == its, "the slice of a process that ended is free"


ALL_KINDS = """
import pytest

def test_passes(): pass

@pytest.mark.skip(reason="not today")
def test_marked(): pass

def test_calls(): pytest.skip("found nothing")

@pytest.mark.xfail(reason="known", strict=True)
def test_expected_to_fail(): assert False

@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.xdist_group("one")
def test_each(name):
    if name == "b":
        pytest.skip("no b")
"""
SKIPPED_MODULE = 'import pytest\npytest.skip("whole", allow_module_level=True)\n'


@pytest.fixture(autouse=True)
def few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the inner runs from importing plugins that they do not use, once in each of their workers."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


WORKERS = ["-p", "xdist", "-n", "2", "--dist", "loadgroup"]


@pytest.fixture
def run(pytester: pytest.Pytester) -> "Run":
    return Run(pytester)


class Run:
    def __init__(self, pytester: pytest.Pytester) -> None:
        self._pytester = pytester

    def __call__(self, allowed: str, *arguments: str) -> pytest.RunResult:
        listed = Path(self._pytester.path, "allowed.toml")
        listed.write_text(allowed, encoding="utf-8")
        return self._pytester.runpytest_inprocess("-p", "tests.support.skips", f"--allowed-skips={listed}", *arguments)


def test_a_run_without_skips_passes(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile("def test_passes(): pass")
    assert run("allowed = []").ret == pytest.ExitCode.OK


@pytest.mark.parametrize("workers", [[], WORKERS], ids=["one process", "workers"])
def test_each_kind_of_skip_fails_the_run_and_is_named_with_its_reason(
    pytester: pytest.Pytester, run: Run, workers: list[str]
) -> None:
    pytester.makepyfile(test_kinds=ALL_KINDS, test_module=SKIPPED_MODULE)
    result = run("allowed = []", *workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines_random(
        [
            "test_kinds.py::test_marked: *not today",
            "test_kinds.py::test_calls: *found nothing",
            "test_kinds.py::test_expected_to_fail: expected to fail: *known",
            "test_kinds.py::test_each[[]b]*: *no b",
            "test_module.py: *whole",
        ]
    )
    result.stdout.no_fnmatch_line("*test_passes:*")


def test_listed_skips_pass(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(test_kinds=ALL_KINDS, test_module=SKIPPED_MODULE)
    patterns = ["test_kinds.py::test_[mce]*", "test_kinds.py::test_each[b]", "test_module.py"]
    entries = ", ".join(f'{{test = "{pattern}", reason = "agreed"}}' for pattern in patterns)
    result = run(f"allowed = [{entries}]")
    assert result.ret == pytest.ExitCode.TESTS_FAILED, "brackets are no character class"

    patterns[0] = "test_kinds.py::test_*"
    entries = ", ".join(f'{{test = "{pattern}", reason = "agreed"}}' for pattern in patterns)
    assert run(f"allowed = [{entries}]").ret == pytest.ExitCode.OK
