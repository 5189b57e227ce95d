"""`make upgrade`: ends with one JSON line; exit status 1 if a transaction was lost, doubled, contradicted or is stuck.

The directory with the history, the topics and all logs is kept where something is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.chaos.ending import end, say
from tests.upgrade.release import installed
from tests.upgrade.story import play

BEFORE_ACCESS_CONTROL = "1bf5185"
"""The last commit before access control."""


def main() -> int:
    """Install the earlier release, and play the upgrade."""
    parser = argparse.ArgumentParser(prog="python -m tests.upgrade", description=__doc__)
    parser.add_argument("--release", default=BEFORE_ACCESS_CONTROL, help="a commit of this repository without keys")
    parser.add_argument("--keep", action="store_true", help="keep the directory in any case")
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="halfway-upgrade-"))
    say(f"from {given.release}; everything is in {directory}")
    with installed(given.release, directory) as earlier:
        outcome = asyncio.run(play(earlier, directory, say))
    return end(outcome, directory, keep=given.keep)


if __name__ == "__main__":
    sys.exit(main())
