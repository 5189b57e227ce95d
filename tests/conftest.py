pytest_plugins = ("pytester", "tests.skips")
