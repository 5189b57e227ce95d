"""How far the code of one prepare, one commit and one check is spread, on a real Kafka and over all threads.

`python -m tests.support.structure.paths BOOTSTRAP_SERVERS` prints the paths. Lower a bound when its figure falls.
"""

import json
import subprocess
import sys

from tests.support.brokers.fixtures import Kafka
from tests.support.structure.figures import ROOT

BOUNDS = {
    "calls of a prepare": 190,
    "modules of a prepare": 36,
    "changes of module of a prepare": 103,
    "definitions of one verb of a prepare": 8,
    "calls of a commit": 228,
    "modules of a commit": 37,
    "changes of module of a commit": 97,
    "definitions of one verb of a commit": 12,
    "calls of a check": 385,
    "modules of a check": 41,
    "changes of module of a check": 185,
    "definitions of one verb of a check": 11,
}


def test_the_paths_do_not_grow(kafka: Kafka) -> None:
    """There is a small reserve: beside other work a poll, a heartbeat or a timer can be in each of the runs."""
    measure = (sys.executable, "-m", "tests.support.structure.paths", kafka.bootstrap_servers)
    done = subprocess.run(measure, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.keys() == BOUNDS.keys()
    longer = {name: figure for name, figure in figures.items() if figure > BOUNDS[name]}
    assert not longer, done.stdout
