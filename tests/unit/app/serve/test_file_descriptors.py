"""The number of connections depends on the limit of open files."""

import resource

import pytest

from halfway.app.serve.process import connections_within, raise_limit
from halfway.http.server.server import MAX_CONNECTIONS


@pytest.mark.parametrize("limit", [256, 1_024, 4_096, 20_000, 1_048_576])
def test_files_are_left_for_kafka_however_many_connect(limit: int) -> None:
    held = connections_within(limit)
    assert 0 < held <= MAX_CONNECTIONS
    assert limit - held >= limit // 3


def test_where_there_is_room_the_bound_is_the_usual_one() -> None:
    assert connections_within(65_536) == MAX_CONNECTIONS
    assert connections_within(4_096) < 4_096 - 1_000


def test_the_soft_limit_is_raised_as_far_as_it_may_be() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        held = raise_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == before[1]
        assert soft == min(hard, 65_536) or hard == resource.RLIM_INFINITY
        assert held == connections_within(soft)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
