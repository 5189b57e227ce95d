"""Runs `halfway`, also as `python -m halfway.app.cli`."""

import os
import signal
import sys


def main() -> None:
    """Run the command line. While the modules of `serve` are imported, SIGTERM ends it with status 0."""
    if sys.argv[1:2] == ["serve"]:
        signal.signal(signal.SIGTERM, lambda _signal, _frame: os._exit(0))
    from halfway.app.cli import main as command_line

    command_line.main()


if __name__ == "__main__":
    main()
