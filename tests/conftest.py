pytest_plugins = ("pytester", "tests.skips", "tests.fixtures_kafka")
