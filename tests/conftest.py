import os

from hypothesis import HealthCheck, settings

pytest_plugins = ("pytester", "tests.skips", "tests.fixtures_kafka", "tests.fixtures_spark")

# Reproducible where `CI` is set, random elsewhere; a failure prints what reproduces it. A slow machine is no failure.
settings.register_profile(
    "halfway",
    deadline=None,
    print_blob=True,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("halfway")
