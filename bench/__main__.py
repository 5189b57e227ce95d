"""`python -m bench`: measures, prints a table and writes build/bench.json; more runs: see `python -m bench --help`.

Exit status 1 when the checker finds anything, or when a request failed.
"""

from __future__ import annotations

import argparse
import sys

from bench.rig import RigError
from bench.runs import beside, checks, client, console, fleets, limits, overload, pipeline, recovery, soak, standard


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for and return the exit status."""
    given = _parser().parse_args(arguments)
    try:
        return int(given.run(given))
    except RigError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    standard.add_to(parser)
    kinds = parser.add_subparsers(title="other runs")
    for run in (client, console, soak, overload, limits, beside, checks, recovery, fleets, pipeline):
        run.add(kinds)
    return parser


if __name__ == "__main__":
    sys.exit(main())
