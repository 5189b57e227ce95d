"""How far the code of one prepare, one commit and one check is spread, on a real Kafka and over all threads.

`python -m tests.support.structure.paths BOOTSTRAP_SERVERS` prints the paths. Lower a bound when its figure falls.
"""

import json
import subprocess
import sys

from tests.support.brokers.fixtures import Kafka
from tests.support.structure.figures import ROOT

BOUNDS = {
    "functions of a prepare": 166,
    "modules of a prepare": 35,
    "definitions of one verb of a prepare": 8,
    "functions of a commit": 181,
    "modules of a commit": 39,
    "definitions of one verb of a commit": 10,
    "functions of a check": 235,
    "modules of a check": 40,
    "definitions of one verb of a check": 10,
}
"""How often a function is called, and where threads take turns, depends on the machine: that is printed only."""


def test_the_paths_do_not_grow(kafka: Kafka) -> None:
    """There is a small reserve: beside other work a poll, a heartbeat or a timer can be in each of the runs."""
    measure = (sys.executable, "-m", "tests.support.structure.paths", kafka.bootstrap_servers)
    done = subprocess.run(measure, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    longer = {name: figures[name] for name, bound in BOUNDS.items() if figures[name] > bound}
    assert not longer, f"{longer}\n{done.stdout}"
