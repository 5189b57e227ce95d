"""Runs one process, and ends it when the parent process is gone for any reason.

A separate program, started by `halfway.embedded.process`; it uses only the standard library. Its standard input is a
pipe whose other end only the parent holds: when it closes, the child is killed. Because a process that the parent
forked may hold that end too, the parent's id is watched as well.

    supervisor.py PARENT_PID LOG DOOMED COMMAND...

The child's output is appended to the file LOG. The directory DOOMED ("" for none) is deleted when the parent is gone.

Each byte of standard input is a command: t (SIGTERM), k (SIGKILL), p (SIGSTOP), c (SIGCONT). Each line of standard
output is an event: `pid N` once, or `failed REASON` if the child could not be run; `ok` when a signal is sent; `exited
STATUS` at the end, with the status of `subprocess`.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys

COMMANDS = {ord("t"): signal.SIGTERM, ord("k"): signal.SIGKILL, ord("p"): signal.SIGSTOP, ord("c"): signal.SIGCONT}
WATCH_PARENT_S = 0.5


def main(arguments: list[str]) -> None:
    parent_pid, log_path, doomed, *command = arguments
    wake = _wake_on_signals()
    try:
        child = _run(command, log_path)
    except OSError as error:
        _print(f"failed {error}")
        return
    _print(f"pid {child.pid}")
    try:
        abandoned = _run_commands(child, int(parent_pid), wake)
    finally:
        child.kill()
        status = child.wait()
    if abandoned and doomed:
        shutil.rmtree(doomed, ignore_errors=True)
    _print(f"exited {status}")


def _run(command: list[str], log_path: str) -> "subprocess.Popen[bytes]":
    with open(log_path, "ab") as log:  # noqa: PTH123  pathlib takes twice the time of all the rest to import
        return subprocess.Popen(  # noqa: S603  the parent's command
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_supervisor if sys.platform == "linux" else None,  # noqa: PLW1509  there are no threads here
        )


def _run_commands(child: "subprocess.Popen[bytes]", parent_pid: int, wake: int) -> bool:
    """Send the requested signals until the child ends (return False) or the parent is gone (return True)."""
    while child.poll() is None:
        readable, _, _ = select.select([0, wake], [], [], WATCH_PARENT_S)
        if wake in readable and any(number != signal.SIGCHLD for number in os.read(wake, 64)):
            return True
        if os.getppid() != parent_pid:
            return True
        if 0 in readable:
            commands = os.read(0, 64)
            if not commands:
                return True
            for command in commands:
                child.send_signal(COMMANDS[command])
                _print("ok")
    return False


def _wake_on_signals() -> int:
    """Return a file descriptor that receives the number of each signal: the child has ended, or this process must."""
    wake, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return wake


def _die_with_supervisor() -> None:
    """Make the kernel kill the child when this process dies; more exactly, when its only thread does."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # the parent may be gone
        os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
