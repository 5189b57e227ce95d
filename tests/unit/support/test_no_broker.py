"""What `--no-broker` leaves out."""

import pytest

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


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> "Run":
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(TESTS)
    return Run(pytester)


class Run:
    def __init__(self, pytester: pytest.Pytester) -> None:
        self._pytester = pytester

    def __call__(self, *arguments: str) -> dict[str, int]:
        result = self._pytester.runpytest_inprocess("-p", "tests.support.no_broker", *arguments)
        return result.parseoutcomes()


def test_all_tests_run_without_it(run: Run) -> None:
    assert run() == {"passed": 5}


def test_what_asks_for_a_broker_by_a_fixture_or_a_parameter_is_left_out(run: Run) -> None:
    assert run("--no-broker", "-k", "not hides") == {"passed": 2, "deselected": 3}


def test_a_broker_that_is_asked_for_in_another_way_is_an_error(run: Run) -> None:
    assert run("--no-broker", "-k", "hides") == {"errors": 1, "deselected": 4}
