import os

from hypothesis import HealthCheck, settings

from halfway.embedded import ports

pytest_plugins = (
    "pytester",
    "tests.support.skips",
    "tests.support.brokers.fixtures",
    "tests.support.pipeline.fixtures",
)

# Reproducible where `CI` is set, random elsewhere; a failure prints what reproduces it. A slow machine is no failure.
settings.register_profile(
    "halfway",
    deadline=None,
    print_blob=True,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("halfway")


def _take_own_ports(worker: str, count: int) -> None:
    """Pick ports from a part that is this worker's own: one picks what another has picked and not yet listens at."""
    number = int(worker.removeprefix("gw"))
    lowest, end = ports._LOWEST, ports._first_ephemeral_port()
    share = (end - lowest) // count
    ports._LOWEST = lowest + number * share
    ports._first_ephemeral_port = lambda: lowest + (number + 1) * share


if "PYTEST_XDIST_WORKER" in os.environ:
    _take_own_ports(os.environ["PYTEST_XDIST_WORKER"], int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
