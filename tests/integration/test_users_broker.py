"""The fixtures that users enable, on a broker that they start themselves."""

import pytest

from tests.unit.test_users_fixtures import ALONE, SUITE


@pytest.mark.usefixtures("short_lived_brokers")
def test_the_same_suite_runs_against_an_embedded_broker(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["halfway.testing.fixtures"]')
    pytester.makepyfile(SUITE)
    pytester.runpytest_inprocess(*ALONE, "--halfway=kafka").assert_outcomes(passed=1)
