"""The fixtures that users enable, in a suite of theirs."""

import pytest

ALONE = ("-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:schemathesis")
SUITE = """
from halfway.client import Message, SyncHalfway


def test_an_order_is_sent(halfway_server):
    topic = halfway_server.new_topic("orders")
    with SyncHalfway(halfway_server.url, "shop") as halfway:
        halfway.register(topics=[topic])
        with halfway.transaction([Message(topic=topic, key="42", value="paid")]):
            pass
    assert [record.value for record in halfway_server.records(topic)] == [b"paid"]
"""


def test_a_suite_of_a_user_runs_against_memory_unless_told_otherwise(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["halfway.testing.fixtures"]')
    pytester.makepyfile(SUITE)
    pytester.runpytest_inprocess(*ALONE).assert_outcomes(passed=1)


def test_the_option_names_what_there_is(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["halfway.testing.fixtures"]')
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess(*ALONE, "--halfway=rabbit")
    result.stderr.fnmatch_lines(["*--halfway: invalid choice: 'rabbit'*"])
