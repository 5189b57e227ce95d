"""The supervisor, with small programs in the place of the broker."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from halfway.embedded import SupervisorError
from halfway.embedded.process import SupervisedProcess
from tests.support.processes import alive, eventually

SLEEP = ["sleep", "600"]
# Starts a supervised sleep, tells its and the supervisor's process id, and then does what its second argument says.
PARENT = """
import os, subprocess, sys, time
from pathlib import Path
from halfway.embedded.process import SupervisedProcess
folder = Path(sys.argv[1])
process = SupervisedProcess(["sleep", "600"], cwd=folder, log_path=folder / "log", doomed=folder / "doomed")
print(process.pid, process._supervisor.pid, flush=True)
exec(sys.argv[2])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "doomed").mkdir()
    (tmp_path / "doomed" / "data").write_text("x", encoding="utf-8")
    return tmp_path


def start_parent(folder: Path, then: str) -> tuple["subprocess.Popen[str]", int, int]:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder), then], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, supervisor = map(int, parent.stdout.readline().split())
    assert alive(pid)
    return parent, pid, supervisor


def end(parent: "subprocess.Popen[str]") -> None:
    parent.kill()
    parent.wait()
    assert parent.stdout is not None
    parent.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_parent_and_the_doomed_directory_is_deleted(folder: Path, number: signal.Signals) -> None:
    parent, pid, supervisor = start_parent(folder, "time.sleep(600)")
    parent.send_signal(number)
    assert eventually(lambda: not alive(pid) and not alive(supervisor))
    assert not (folder / "doomed").exists()
    end(parent)


def test_it_ends_with_a_parent_that_just_finishes(folder: Path) -> None:
    parent, pid, supervisor = start_parent(folder, "")
    assert eventually(lambda: not alive(pid) and not alive(supervisor))
    assert not (folder / "doomed").exists()
    end(parent)


@pytest.mark.parametrize(
    "then",
    [
        "print(subprocess.Popen(['sleep', '600'], close_fds=False).pid, flush=True); time.sleep(600)",
        "child = os.fork()\nif child: print(child, flush=True)\nos.close(1)\ntime.sleep(600)",
    ],
    ids=["a program started beside it", "a process forked from it"],
)
def test_it_ends_with_its_parent_though_another_process_lives(folder: Path, then: str) -> None:
    parent, pid, _ = start_parent(folder, then)
    assert parent.stdout is not None
    other = int(parent.stdout.readline())
    parent.kill()
    assert eventually(lambda: not alive(pid))
    assert alive(other)
    os.kill(other, signal.SIGKILL)
    end(parent)


def test_it_ends_with_its_supervisor_and_the_parent_learns_of_it(folder: Path) -> None:
    process = SupervisedProcess(SLEEP, cwd=folder, log_path=folder / "log")
    process._supervisor.kill()
    assert eventually(lambda: not alive(process.pid))
    assert process.wait(60) == -9


def test_it_is_frozen_and_goes_on(folder: Path) -> None:
    process = SupervisedProcess(SLEEP, cwd=folder, log_path=folder / "log")
    state = Path(f"/proc/{process.pid}/stat")
    process.pause()
    assert eventually(lambda: ") T " in state.read_text(encoding="ascii"))
    process.resume()
    assert eventually(lambda: ") S " in state.read_text(encoding="ascii"))
    process.kill()


def test_a_frozen_one_can_be_killed_and_dies_with_its_parent(folder: Path) -> None:
    parent, pid, _ = start_parent(folder, "process.pause(); print(flush=True); time.sleep(600)")
    assert parent.stdout is not None
    parent.stdout.readline()
    parent.kill()
    assert eventually(lambda: not alive(pid))
    end(parent)


def test_its_end_is_told_with_its_status_and_its_output_is_kept(folder: Path) -> None:
    log = folder / "log"
    log.write_text("before\n", encoding="utf-8")
    process = SupervisedProcess(["sh", "-c", "echo out; echo err >&2; exit 3"], cwd=folder, log_path=log)
    assert process.wait(60) == 3
    assert log.read_text(encoding="utf-8") == "before\nout\nerr\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ended_by_a_signal_its_status_is_the_signal(folder: Path, number: signal.Signals) -> None:
    process = SupervisedProcess(SLEEP, cwd=folder, log_path=folder / "log")
    assert process.poll() is None
    if number == signal.SIGTERM:
        process.terminate()
    else:
        process.kill()
    assert process.wait(60) == -number
    assert not alive(process.pid)


def test_a_signal_after_the_end_does_nothing(folder: Path) -> None:
    process = SupervisedProcess(["true"], cwd=folder, log_path=folder / "log")
    assert process.wait(60) == 0
    process.terminate()
    process.kill()
    assert process.poll() == 0


def test_stopped_by_its_parent_the_doomed_directory_stays(folder: Path) -> None:
    process = SupervisedProcess(SLEEP, cwd=folder, log_path=folder / "log", doomed=folder / "doomed")
    process.kill()
    assert (folder / "doomed" / "data").exists()


def test_a_program_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(SupervisorError, match="no-such-program"):
        SupervisedProcess(["no-such-program"], cwd=folder, log_path=folder / "log")
