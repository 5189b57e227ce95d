"""`--no-broker` leaves out the tests that start a Kafka broker or Spark: what remains is `make test-quick`."""

import pytest

STARTED_BY = frozenset({"kafka", "spark"})
"""Fixtures, and values of parameters that have a fixture ask for them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-broker", action="store_true", help="leave out the tests that start a Kafka broker or Spark")


def needs_broker(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    chosen = [] if callspec is None else [value for value in callspec.params.values() if isinstance(value, str)]
    return not STARTED_BY.isdisjoint((*getattr(item, "fixturenames", ()), *chosen))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--no-broker"):
        config.hook.pytest_deselected(items=[item for item in items if needs_broker(item)])
        items[:] = [item for item in items if not needs_broker(item)]


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    if fixturedef.argname in STARTED_BY and request.config.getoption("--no-broker"):
        pytest.fail(f"a test asks for `{fixturedef.argname}` in a way that --no-broker does not see", pytrace=False)
