"""Runs simulations: `make simulate RUNS=1000 SEED=1`. With RUNS=1 it shows the whole story of the seed."""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter

from tests.simulation.instances import silence
from tests.simulation.oracles import problems
from tests.simulation.run import Simulation
from tests.simulation.shrinking import shrink, story
from tests.simulation.story import plan


def main() -> int:
    """Run the seeds; return 1 if one of them has found something."""
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--raw", action="store_true", help="do not cut failing runs down")
    options = parser.parse_args()
    silence()
    gc.collect()
    gc.freeze()  # what is loaded is looked at by no collection
    begun, shown = time.process_time(), time.monotonic()
    kinds: Counter[str] = Counter()
    effects: Counter[str] = Counter()
    failed: list[int] = []
    transactions = 0
    for number in range(options.runs):
        simulation = Simulation(plan(options.seed + number), keeps_trace=options.runs == 1).go()
        transactions += len(simulation.plan.transactions)
        kinds.update(fault.kind for fault in simulation.plan.faults)
        effects.update(simulation.effects)
        if found := problems(simulation):
            failed.append(simulation.plan.seed)
            print(f"seed {simulation.plan.seed}:", *found, sep="\n  ", flush=True)
            if options.runs > 1 and not options.raw:
                print(*story(*shrink(simulation.plan, found)), sep="\n    ", flush=True)
        if simulation.trace is not None:
            print(*simulation.trace, sep="\n")
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{number + 1} runs, {len(failed)} failed", flush=True)
    took = time.process_time() - begun
    print(
        f"{options.runs} runs, {transactions} transactions, {took:.1f} s of CPU, {options.runs / took:.1f} a second; "
        f"faults: {dict(sorted(kinds.items()))}; effects: {dict(sorted(effects.items()))}; "
        f"failed: {failed or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
