"""Runs the order service until standard input is closed, so that it ends when its parent ends, in any way."""

import os
import runpy
import signal
import threading


def stop_when_stdin_closes() -> None:
    # This does not use `sys.stdin`: its lock, held here, would keep the interpreter from ending.
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


threading.Thread(target=stop_when_stdin_closes, daemon=True).start()
runpy.run_module("examples.orders.serve", run_name="__main__", alter_sys=True)
