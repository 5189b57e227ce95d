"""The process that Spark forks its Python workers from, for the tests: with what a worker needs imported already.

`spark.python.daemon.module` names it. Spark puts its own jar on the path of every worker, and Python 3.11 reads the
jar's directory again whenever caches are invalidated, which each task does.
"""

import importlib
import sys

# PyArrow imports pandas, where it is there.
_NEEDED = ("pandas", "pyarrow")


def main() -> None:
    """Take the jar from the path, import what is needed, and serve Spark."""
    sys.path[:] = [entry for entry in sys.path if not entry.endswith((".jar", ".zip"))]
    for entry in [each for each in sys.path_importer_cache if each.endswith((".jar", ".zip"))]:
        del sys.path_importer_cache[entry]
    for name in _NEEDED:
        importlib.import_module(name)
    importlib.import_module("pyspark.daemon").manager()


if __name__ == "__main__":
    main()
