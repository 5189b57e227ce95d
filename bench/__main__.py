"""`python -m bench`: measures, prints a table and writes build/bench.json. `--help` lists other runs.

The exit status is 1 if the checker finds anything, or if a request failed.
"""

from __future__ import annotations

import argparse
import sys

from bench.runs import beside, checks, client, fleets, overload, pipeline, recovery, standard
from bench.system.rig import RigError


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark that the command line selects, and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except RigError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    standard.add_to(parser)
    kinds = parser.add_subparsers(title="other runs")
    for run in (client, overload, beside, checks, recovery, fleets, pipeline):
        run.add(kinds)
    return parser


if __name__ == "__main__":
    sys.exit(main())
