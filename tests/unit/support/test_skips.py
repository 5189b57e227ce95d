"""A test that is skipped without leave fails the run."""

from pathlib import Path

import pytest

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
