"""Checks the model exhaustively, and that it finds each protocol step missing that is left out: `make model`."""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

MODEL = Path(__file__).with_name("halfway.pml")
DEPTH = 100_000
SMALL = {"TRANSACTIONS": 1, "INCARNATIONS": 3, "ACQUISITIONS": 3}
SIZES = (
    SMALL,
    {"TRANSACTIONS": 1, "INCARNATIONS": 4, "ACQUISITIONS": 4},
    {"TRANSACTIONS": 2, "INCARNATIONS": 3, "ACQUISITIONS": 3},
)
LEFT_OUT = (
    "NO_FENCE",
    "NO_CLAIM_FENCE",
    "REINIT_OWN",
    "NO_BARRIER",
    "REUSE",
    "EARLY_COMMIT",
    "RESURRECT",
    "EARLY_ANSWER",
)


class Result(NamedTuple):
    """What SPIN says of one variant."""

    violated: str | None
    states: int
    depth: int
    seconds: float
    complete: bool


def check(sizes: dict[str, int], *left_out: str) -> Result:
    """Search every state of the model in these sizes, or up to the first violation, which is searched breadth first."""
    defines = [f"-D{name}={value}" for name, value in sizes.items()] + [f"-D{name}=1" for name in left_out]
    # Breadth first finds the shortest way to a violation; depth first needs less memory where there is none.
    options = ["-DBFS"] if left_out else ["-DCOLLAPSE"]
    with tempfile.TemporaryDirectory(prefix="halfway-model-") as scratch:
        shutil.copy(MODEL, scratch)
        _run(scratch, "spin", "-a", *defines, MODEL.name)
        _run(scratch, "cc", "-w", "-O2", "-DSAFETY", *options, "-o", "pan", "pan.c")
        began = time.monotonic()
        told = _run(scratch, "./pan", f"-m{DEPTH}")
        seconds = time.monotonic() - began
    violated = re.search(r"pan:1: (.*) \(at depth", told)
    return Result(
        violated=violated[1] if violated else None,
        states=_number(r"(\d+) states, stored", told),
        depth=_number(r"depth reached (\d+)", told),
        seconds=seconds,
        complete="errors: 0" in told
        and "Search not completed" not in told
        and "max search depth too small" not in told,
    )


def _run(folder: str, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)  # noqa: S603  our own
    return done.stdout + done.stderr


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def main() -> int:
    """Check all variants and return the exit status."""
    missing = [program for program in ("spin", "cc") if shutil.which(program) is None]
    if missing:
        print(f"model: {' and '.join(missing)} not found: install Debian's packages spin and gcc", file=sys.stderr)
        return 1
    wrong = 0
    for sizes in SIZES:
        result = check(sizes)
        wrong += result.violated is not None or not result.complete
        told = result.violated or ("holds" if result.complete else "not searched to its end")
        _tell(", ".join(f"{value} {name.lower()}" for name, value in sizes.items()), result, told)
    for left_out in LEFT_OUT:
        result = check(SMALL, left_out)
        wrong += result.violated is None
        _tell(f"{left_out} (must be found)", result, result.violated or "NOT FOUND")
    return 1 if wrong else 0


def _tell(what: str, result: Result, told: str) -> None:
    print(f"{what}: {told}; {result.states:,} states, depth {result.depth}, {result.seconds:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
