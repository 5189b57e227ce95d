"""Run the order service until standard input is closed: however its parent ends, it does not stay behind."""

import os
import runpy
import signal
import threading


def end_with_stdin() -> None:
    # Not through `sys.stdin`: its lock, held here, would keep the interpreter from ending.
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


threading.Thread(target=end_with_stdin, daemon=True).start()
runpy.run_module("examples.orders.serve", run_name="__main__", alter_sys=True)
