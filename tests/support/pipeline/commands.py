"""Commands of `halfway-pipeline` one after the other in one Spark application, whose start costs most.

Arguments: the commands by name as JSON, and a folder for a file for each: its exit status, and when it began and ended,
in ms.
"""

import json
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

from halfway.pipeline import cli


def status_of(command: list[str]) -> int:
    try:
        cli.pipeline(command, standalone_mode=False)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


if __name__ == "__main__":
    stop = SparkSession.stop
    SparkSession.stop = lambda self: None  # type: ignore[method-assign]
    for name, command in json.loads(sys.argv[1]).items():
        begun = time.time()
        status = status_of(command)
        Path(sys.argv[2], f"{name}.json").write_text(json.dumps([status, begun * 1000, time.time() * 1000]))
    stop(SparkSession.getActiveSession() or SparkSession.builder.getOrCreate())
