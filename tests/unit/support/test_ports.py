"""The ports of the tests: no two processes of any run pick the same."""

import subprocess
import sys
from pathlib import Path

from tests.support.ports import take_slice

ROOT = Path(__file__).parents[3]
ANOTHER_RUN = """
import sys
from pathlib import Path
from tests.support.ports import take_slice
print(*take_slice(Path(sys.argv[1])))
"""


def another_run(folder: Path) -> set[int]:
    """Give the ports that another process would pick from."""
    said = subprocess.run(
        [sys.executable, "-c", ANOTHER_RUN, folder], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return {int(port) for port in said.stdout.split()}


def test_each_process_has_a_slice_of_its_own_until_it_ends(tmp_path: Path) -> None:
    mine, its = set(take_slice(tmp_path)), another_run(tmp_path)
    assert mine.isdisjoint(its)
    assert another_run(tmp_path) == its, "the slice of a process that ended is free"
