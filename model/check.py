"""Checks the models exhaustively, and that each mutant has the expected error: `make model`."""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
DEPTH = 100_000
MEMORY_MB = 6_000

OWNERSHIP, POLICY, FOLD, TAIL = "halfway.pml", "policy.pml", "fold.pml", "tail.pml"
CONTENT, IDS = "content.pml", "ids.pml"
Sizes = dict[str, int]
SMALL: Sizes = {"LANES": 1, "INCARNATIONS": 2, "ACQUISITIONS": 3}
SEARCHES: tuple[tuple[str, Sizes], ...] = (
    (FOLD, {}),
    (TAIL, {}),
    (CONTENT, {"PREPARES": 4}),
    (IDS, {}),
    (POLICY, {"CHECKS": 2, "LOSSES": 2, "RESUMES": 1}),
    (OWNERSHIP, SMALL),
    (OWNERSHIP, SMALL | {"STUCK": 1}),
    (OWNERSHIP, SMALL | {"TRANSACTIONS": 2}),
    (OWNERSHIP, {"LANES": 2, "INCARNATIONS": 3, "ACQUISITIONS": 3}),
    (OWNERSHIP, {"LANES": 1, "INCARNATIONS": 3, "ACQUISITIONS": 3, "OTHERS": 1}),
)

# The meaning of each assertion, and the text of it that SPIN prints when it fails.
DECIDED_TWICE = "a transaction is decided twice"
LEAKED = "a message is visible that nobody committed"
TORN = "one topic has its message, the other does not"
WRONG_ANSWER = "a caller gets an outcome that never happens"
WAITS = "a takeover waits forever"
AGAINST_VERDICT = "policy rolls back although commit was said"
AGAINST_PROMISE = "policy rolls back although a refusal said that commit is recorded"
UNCHECKED = "policy rolls back without a check"
UNDER_WAY = "policy gives up while a check is under way"
LEASED = "policy gives up before a check's lease is over"
MISSED = "a recent outcome is missed"
PASSED = "a record is passed without its effect"
TOO_EARLY = "a caller gets 404 before what is in the log was applied"
REVIVED = "an ended transaction is pending again"
FORGOTTEN = "an acknowledged transaction is unknown"
OTHER_CONTENT = "another content than the acknowledged one is found"
KEPT = "an own record is kept after the tail has passed it"
NOT_ONCE = "an id is decided twice"
ASSERTIONS = {
    DECIDED_TWICE: "decided[id[l].tx]==0",
    LEAKED: "(first[0]+second[0])==0",
    TORN: "first[id[l].tx]==second[id[l].tx]",
    WRONG_ANSWER: "told[0]==op[0]",
    WAITS: "ran[it[0].former]",
    AGAINST_VERDICT: "!(commit_said)",
    AGAINST_PROMISE: "!(promised)",
    UNCHECKED: "was_asked",
    UNDER_WAY: "!(asked)",
    LEASED: "!(leased)",
    MISSED: "n<horizon",
    TOO_EARLY: "(log[n]==3))||(log[n]==0)",
    PASSED: "(done[n]||(log[n]==3))",
    REVIVED: "!((ended&&(known!=2)))",
    FORGOTTEN: "&&(known==0)))",
    OTHER_CONTENT: "(it[o].held==acknowledged)",
    KEPT: "(own[n]==0)",
    NOT_ONCE: "(outcome==0)",
}


class Mutant(NamedTuple):
    """A rule that is left out of a model, and the error that must follow."""

    rule: str
    model: str
    error: str
    sizes: Sizes


MUTANTS = (
    Mutant("NO_FENCE", OWNERSHIP, DECIDED_TWICE, SMALL),
    Mutant("NO_CLAIM_FENCE", OWNERSHIP, DECIDED_TWICE, SMALL),
    Mutant("NO_TRUE_END", OWNERSHIP, DECIDED_TWICE, SMALL | {"INCARNATIONS": 3, "PREPARES": 1}),
    Mutant("UNRAISED", OWNERSHIP, DECIDED_TWICE, SMALL | {"OTHERS": 1}),
    Mutant("UNCLOSED", OWNERSHIP, DECIDED_TWICE, SMALL),
    Mutant("WAITS", OWNERSHIP, WAITS, SMALL | {"STUCK": 1}),
    Mutant("LATE_RELEASE", OWNERSHIP, DECIDED_TWICE, SMALL),
    Mutant("UNFINISHED", OWNERSHIP, DECIDED_TWICE, SMALL),
    Mutant("UNSURE_RELEASE", OWNERSHIP, DECIDED_TWICE, SMALL),
    Mutant("HASTY_RELEASE", OWNERSHIP, DECIDED_TWICE, SMALL | {"LANES": 2}),
    Mutant("NO_BARRIER", OWNERSHIP, DECIDED_TWICE, SMALL),
    Mutant("ONE_BARRIER", OWNERSHIP, DECIDED_TWICE, SMALL),
    Mutant("REINIT_OWN", OWNERSHIP, DECIDED_TWICE, SMALL),
    Mutant("REUSE", OWNERSHIP, LEAKED, SMALL),
    Mutant("EARLY_COMMIT", OWNERSHIP, TORN, SMALL),
    Mutant("RESURRECT", OWNERSHIP, DECIDED_TWICE, SMALL),
    Mutant("EARLY_ANSWER", OWNERSHIP, WRONG_ANSWER, SMALL),
    Mutant("STALE", POLICY, AGAINST_VERDICT, {}),
    Mutant("NOT_AT_BEGIN", POLICY, AGAINST_VERDICT, {}),
    Mutant("PULLED_FORGOTTEN", POLICY, AGAINST_VERDICT, {}),
    Mutant("PUSHED_FORGOTTEN", POLICY, AGAINST_VERDICT, {}),
    Mutant("CALLER_FORGOTTEN", POLICY, AGAINST_VERDICT, {}),
    Mutant("EARLY_REFUSAL", POLICY, AGAINST_PROMISE, {}),
    Mutant("CHECKED_FORGETS", POLICY, AGAINST_PROMISE, {}),
    Mutant("PARK_FORGETS", POLICY, AGAINST_VERDICT, {}),
    Mutant("RESUME_FORGETS", POLICY, AGAINST_PROMISE, {}),
    Mutant("AGE_ALONE", POLICY, UNCHECKED, {}),
    Mutant("UNDER_WAY", POLICY, UNDER_WAY, {}),
    Mutant("LEASE_IGNORED", POLICY, LEASED, {}),
    Mutant("LSO_FORGOTTEN", FOLD, MISSED, {}),
    Mutant("LSO_AFTERWARDS", FOLD, MISSED, {}),
    Mutant("CURSOR_ALONE", FOLD, MISSED, {}),
    Mutant("NO_BARRIER", FOLD, MISSED, {}),
    Mutant("OFFSET_ALONE", TAIL, PASSED, {}),
    Mutant("KNOWN_ID", TAIL, PASSED, {}),
    Mutant("NOT_APPLIED", TAIL, PASSED, {}),
    Mutant("COUNTED", TAIL, PASSED, {}),
    Mutant("POSITION_FIRST", TAIL, TOO_EARLY, {}),
    Mutant("TOMBSTONE_ALONE", TAIL, FORGOTTEN, {}),
    Mutant("RESURRECT", TAIL, REVIVED, {}),
    Mutant("FIRST_COUNTS", CONTENT, OTHER_CONTENT, {}),
    Mutant("LAST_COUNTS", CONTENT, OTHER_CONTENT, {}),
    Mutant("NOT_READ", CONTENT, OTHER_CONTENT, {}),
    Mutant("NOT_FINAL", CONTENT, OTHER_CONTENT, {}),
    Mutant("DOUBT_DROPPED", CONTENT, OTHER_CONTENT, {}),
    Mutant("AGE_IGNORED", IDS, NOT_ONCE, {}),
    Mutant("CLOCK_ALONE", IDS, NOT_ONCE, {}),
    Mutant("END_ALONE", IDS, NOT_ONCE, {}),
    Mutant("NO_MINUTE", IDS, NOT_ONCE, {}),
    Mutant("FORGOTTEN_EARLY", IDS, NOT_ONCE, {}),
    Mutant("FOLD_ALONE", IDS, NOT_ONCE, {}),
    Mutant("UNREAD", IDS, NOT_ONCE, {}),
)


class Result(NamedTuple):
    """The result of SPIN for one variant."""

    violated: str | None
    states: int
    depth: int
    seconds: float
    complete: bool


def check(model: str, sizes: Sizes, left_out: str | None = None) -> Result:
    """Search all states of a model with these sizes, or breadth first up to the first violation of a mutant."""
    defines = [f"-D{name}={value}" for name, value in sizes.items()]
    if left_out is not None:
        defines.append(f"-D{left_out}=1")
    # Breadth first finds the shortest path to a violation; depth first needs less memory if there is none.
    options = ["-DCOLLAPSE" if left_out is None else "-DBFS", f"-DMEMLIM={MEMORY_MB}"]
    with tempfile.TemporaryDirectory(prefix="halfway-model-") as scratch:
        shutil.copy(FOLDER / model, scratch)
        _run(scratch, "spin", "-a", *defines, model)
        _run(scratch, "cc", "-w", "-O2", "-DSAFETY", *options, "-o", "pan", "pan.c")
        started = time.monotonic()
        output = _run(scratch, "./pan", f"-m{DEPTH}")
        seconds = time.monotonic() - started
    violated = re.search(r"pan:1: (.*) \(at depth", output)
    return Result(
        violated=_meaning(violated[1]) if violated else None,
        states=_number(r"(\d+) states, stored", output),
        depth=_number(r"depth reached (\d+)", output),
        seconds=seconds,
        complete="errors: 0" in output
        and "Search not completed" not in output
        and "max search depth too small" not in output,
    )


def _run(folder: str, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)  # noqa: S603  our own
    return done.stdout + done.stderr


def _meaning(violated: str) -> str:
    return next((error for error, assertion in ASSERTIONS.items() if assertion in violated), violated)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


def main() -> int:
    """Check all variants and return the exit status."""
    missing = [program for program in ("spin", "cc") if shutil.which(program) is None]
    if missing:
        print(f"model: {' and '.join(missing)} not found: install Debian's packages spin and gcc", file=sys.stderr)
        return 1
    unexpected = 0
    for model, sizes in SEARCHES:
        result = check(model, sizes)
        unexpected += result.violated is not None or not result.complete
        outcome = result.violated or ("holds" if result.complete else "NOT SEARCHED TO ITS END")
        _print(" ".join([model, *(f"{name}={value}" for name, value in sizes.items())]), result, outcome)
    for mutant in MUTANTS:
        result = check(mutant.model, mutant.sizes, mutant.rule)
        is_expected = result.violated == mutant.error
        unexpected += not is_expected
        outcome = result.violated or "nothing"
        _print(
            f"{mutant.model}, {mutant.rule}", result, outcome if is_expected else f"{outcome}, BUT NOT: {mutant.error}"
        )
    return 1 if unexpected else 0


def _print(what: str, result: Result, outcome: str) -> None:
    print(f"{what}: {outcome}; {result.states:,} states, depth {result.depth}, {result.seconds:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
