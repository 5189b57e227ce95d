"""The time limits of a stop."""

from halfway.app.serve.backend import STOP_S
from halfway.app.settings import load


def test_the_grace_of_the_compose_file_is_longer_than_a_stop() -> None:
    """Docker's and Kubernetes' usual 30 s are enough too, with a margin."""
    assert load({}).drain_s + STOP_S <= 30 - 5
