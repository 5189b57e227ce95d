"""The process that Spark forks its Python workers from, for the tests: with what a worker needs imported already.

`spark.python.daemon.module` names it. Spark puts its own jar on the path of every worker, and Python 3.11 reads the jar's
directory again whenever caches are invalidated, which each task does.
"""

import sys

sys.path[:] = [entry for entry in sys.path if not entry.endswith((".jar", ".zip"))]
for entry in [entry for entry in sys.path_importer_cache if entry.endswith((".jar", ".zip"))]:
    del sys.path_importer_cache[entry]

import fastavro  # noqa: E402, F401
import pandas  # noqa: E402, F401 - PyArrow imports it
import pyarrow  # noqa: E402, F401
from pyspark import daemon  # noqa: E402

import halfway.pipeline.decoding  # noqa: E402, F401

if __name__ == "__main__":
    daemon.manager()
