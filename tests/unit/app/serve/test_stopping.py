"""The time limits of a stop."""

import pytest

from halfway.app.serve.app import time_to_finish
from halfway.app.settings import load


@pytest.mark.parametrize("stop_s,finishing_s", [(25, 18), (20, 13), (14, 7), (3, 1.5), (0.1, 0.05)])
def test_a_stop_keeps_time_for_closing(stop_s: float, finishing_s: float) -> None:
    """Requests in flight get the remaining time, so that the whole stop fits into the limit."""
    assert time_to_finish(stop_s) == finishing_s


def test_the_grace_of_the_compose_file_is_longer_than_a_stop() -> None:
    """Docker's and Kubernetes' usual 30 s are enough too, with a margin."""
    settings = load({})
    assert settings.drain_s + settings.shutdown_timeout_s <= 30 - 5
