"""How far the code of one prepare, one commit and one check is spread, on a real Kafka and over all threads.

`python -m tests.support.structure.paths BOOTSTRAP_SERVERS` prints the paths. Lower a bound when its figure falls.
"""

import json
import subprocess
import sys

from tests.support.brokers.fixtures import Kafka
from tests.support.structure.figures import ROOT

BOUNDS = {
    "functions of a prepare": 187,
    "modules of a prepare": 40,
    "definitions of one verb of a prepare": 9,
    "functions of a commit": 203,
    "modules of a commit": 44,
    "definitions of one verb of a commit": 10,
    "functions of a check": 244,
    "modules of a check": 41,
    "definitions of one verb of a check": 10,
}
"""How often a function is called, and where threads take turns, depends on the machine: that is printed only."""


def test_the_paths_do_not_grow(kafka: Kafka) -> None:
    """There is a small reserve: what an idle coordinator does seldom, a poll or a timer, can be in each run."""
    measure = (sys.executable, "-m", "tests.support.structure.paths", kafka.bootstrap_servers)
    done = subprocess.run(measure, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    longer = {name: figures[name] for name, bound in BOUNDS.items() if figures[name] > bound}
    assert not longer, f"{longer}\n{done.stdout}"
