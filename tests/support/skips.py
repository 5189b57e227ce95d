"""A run with a skipped test fails, unless the test is listed with its reason in `allowed_skips.toml`.

A test skipped by mistake looks like one that passed, so a skip or an expected failure is agreed on in one place.
"""

import fnmatch
import tomllib
from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

ALLOWED_SKIPS = Path(__file__).parents[1] / "allowed_skips.toml"
# A worker of pytest-xdist does not report a module that is skipped as a whole to its controller; it hands it over here.
FROM_WORKER = "skipped_modules"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--allowed-skips", type=Path, default=ALLOWED_SKIPS, help="the list of tests that may be skipped, with reasons"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SkipGuard(config), "halfway-skips")


def read_allowed(path: Path) -> dict[str, str]:
    """Give the reason of each allowed pattern."""
    allowed: dict[str, str] = {}
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["allowed"]:
        if set(entry) != {"test", "reason"} or not entry["reason"].strip():
            raise pytest.UsageError(f"{path}: {entry} needs a test and a reason, and nothing else")
        allowed[entry["test"]] = entry["reason"]
    return allowed


def why_skipped(report: pytest.TestReport | pytest.CollectReport) -> str:
    expected_failure: str | None = getattr(report, "wasxfail", None)
    if expected_failure is not None:
        return f"expected to fail: {expected_failure}"
    match report.longrepr:
        case (_, _, reason):
            return str(reason)
        case other:
            return str(other)


def matches(node_id: str, pattern: str) -> bool:
    """Match as a shell does, but take the brackets of a parametrized test as they stand.

    pytest-xdist adds `@group` to the id of a test that is marked with a group.
    """
    literal_brackets = pattern.replace("[", "[[]")
    return any(fnmatch.fnmatchcase(name, literal_brackets) for name in (node_id, node_id.rpartition("@")[0]))


class SkipGuard:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._allowed = read_allowed(config.getoption("--allowed-skips"))
        self._skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._skipped[report.nodeid] = why_skipped(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._skipped[report.nodeid] = why_skipped(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self._skipped |= getattr(node, "workeroutput", {}).get(FROM_WORKER, {})

    @property
    def _not_allowed(self) -> dict[str, str]:
        return {
            node_id: reason
            for node_id, reason in self._skipped.items()
            if not any(matches(node_id, pattern) for pattern in self._allowed)
        }

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        worker_output: dict[str, object] | None = getattr(self._config, "workeroutput", None)
        if worker_output is not None:
            worker_output[FROM_WORKER] = self._skipped
            return (yield)
        # First the others, so that the exit status of pytest-xdist's workers is not written over this one.
        yield
        if self._not_allowed and session.exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        if self._not_allowed:
            terminalreporter.section("skipped without leave", sep="=", red=True, bold=True)
            for node_id, reason in sorted(self._not_allowed.items()):
                terminalreporter.line(f"{node_id}: {reason}")
            terminalreporter.line("Make them run, or list them with a reason in tests/allowed_skips.toml.")
