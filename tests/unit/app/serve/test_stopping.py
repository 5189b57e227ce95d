"""The time limits of a stop."""

import subprocess
import sys

from halfway.app.serve.backend import STOP_S
from halfway.app.settings import load

WENT_ON = 3


def test_the_grace_of_the_compose_file_is_longer_than_a_stop() -> None:
    """Docker's and Kubernetes' usual 30 s are enough too, with a margin."""
    assert load({}).drain_s + STOP_S <= 30 - 5


def test_a_stop_during_the_imports_is_no_failure() -> None:
    """SIGTERM comes while `halfway.app.cli.main` is found: before any of it runs."""
    program = f"""
import os, signal, sys
from halfway.app.cli import __main__ as entry

class Found:
    def find_spec(self, name, path, target=None):
        if name == "halfway.app.cli.main":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Found())
sys.argv = ["halfway", "serve"]
entry.main()
sys.exit({WENT_ON})
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
