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


def test_what_asks_for_a_broker_by_a_fixture_or_a_parameter_is_left_out(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is asked for in another way is an error."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess("-p", "tests.support.no_broker", "--no-broker")
    assert result.parseoutcomes() == {"passed": 2, "deselected": 2, "errors": 1}
