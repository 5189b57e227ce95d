"""What holds for all tests.

A test that needs Kafka asks for the fixture `kafka` (or, among the acceptance tests, for `coordinator`, `rest`, `topic`
and `group`): one broker for all tests of a run and one coordinator for all tests of a worker. Tests keep apart by the
names of their topics, groups and prefixes, so each of these names is made of a new UUID. A broker or a coordinator of
one's own (`new_coordinator`, `guarded_kafka`, `proxied_kafka`, `EmbeddedKafka`) costs seconds of CPU: take it only if
the test stops it or needs other settings. Tests that share a fixture which starts servers carry one `xdist_group`, or
each worker starts them again.
"""

import atexit
import gc
import os
import sys
from collections.abc import Generator

import pytest
import structlog
from hypothesis import HealthCheck, settings

from halfway.embedded import broker as ports
from tests.support.late_connections import close_late_connections
from tests.support.ports import in_turn

pytest_plugins = (
    "pytester",
    "tests.support.no_broker",
    "tests.support.order",
    "tests.support.skips",
    "tests.support.brokers.jvm",
    "tests.support.brokers.fixtures",
    "tests.support.databases.fixtures",
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


# Before any process is started: else each coordinator and each worker would compile all that it imports again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Else extensions report leaks when Python ends. pytest itself collects five times before that.
atexit.register(gc.unfreeze)

# To draw each exception with its local variables takes a second of CPU.
structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback

ports.candidates = in_turn
close_late_connections()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect garbage once after the imports, not on the way, and then never look through what was imported again.

    Each look through all of it takes a quarter of a second, and tests collect often. For the same reason no test calls
    `gc.unfreeze`.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
