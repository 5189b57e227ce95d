"""The ports of the tests: no two processes of any run pick the same."""

import subprocess
import sys
from pathlib import Path

import pytest

from halfway.embedded import properties as ports
from tests.support import ports as test_ports
from tests.support.ports import FIRST, SLICE, SLICES, in_turn, take_slice

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


def test_the_slices_lie_below_what_halfway_picks_by_itself(tmp_path: Path) -> None:
    slices = [take_slice(tmp_path) for _ in range(SLICES)]
    assert len({port for each in slices for port in each}) == SLICE * SLICES
    assert min(map(min, slices)) == FIRST
    assert max(map(max, slices)) < ports.LOWEST
    with pytest.raises(RuntimeError, match="end one of the runs"):
        take_slice(tmp_path)


def test_a_port_is_given_again_only_when_all_others_were() -> None:
    """So what was picked and is not yet listened at is not picked again."""
    picked = [ports.pick_port() for _ in range(100)]
    assert len(set(picked)) == len(picked)
    assert set(picked) <= set(in_turn())
    assert ports.candidates is test_ports.in_turn
