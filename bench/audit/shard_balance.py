"""How evenly the ids that the server makes are spread over the shards within a second."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Final

from bench.audit.journal import COMMITTED
from halfway.domain.ids import parse_server_id

_MS_IN_S: Final = 1000


def shard_shares(journal: Path, shards: int) -> tuple[float, float] | None:
    """Return the lowest and the highest share of a shard within one second, in even shares: 1 is perfectly even.

    The first and the last second are left out, because they are not whole. None if nothing is left then.
    """
    made: defaultdict[int, Counter[int]] = defaultdict(Counter)
    with journal.open("rb") as file:
        for line in file:
            if not line.startswith(COMMITTED):
                continue
            parsed = parse_server_id(line.split()[1].decode())
            if parsed is not None:
                shard, at = parsed
                made[at // _MS_IN_S][shard] += 1
    whole = sorted(made)[1:-1]
    shares = [made[second][shard] * shards / made[second].total() for second in whole for shard in range(shards)]
    return (min(shares), max(shares)) if shares else None
