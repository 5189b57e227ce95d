"""The audit of a run's topics, compared with the checker, transaction by transaction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from deltalake import DeltaTable

from checker.cases import CLOCKS_APART_MS, COMMITTED, ROLLED_BACK, Case
from checker.rules import Finding
from halfway.pipeline import tables as runs
from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.jobs import audit
from halfway.pipeline.sources.duckdb import DuckReader
from halfway.pipeline.sources.pinned import KafkaSource
from halfway.pipeline.tables import LocalFolder
from halfway.pipeline.transforms.verdict import ANOMALIES

Row = Mapping[str, Any]
"""One row of the audit's table `verdicts`."""
_MEANS: Final = {"committed_ok": COMMITTED, "rolled_back_ok": ROLLED_BACK}
_SEEN: Final = frozenset({"lost", "doubled", "torn", "contradicted", "leaked"})
"""The checker's findings that are visible in the topics, regardless of answers."""


def audited(bootstrap_servers: str, prefix: str, horizon_s: float, directory: Path) -> list[Row]:
    """Audit the current topics, on DuckDB, into a folder `audit`."""
    folder = directory / "audit"
    servers = {"bootstrap.servers": bootstrap_servers}
    access = KafkaAccess(librdkafka=servers, prefix=prefix)
    engine = DuckEngine()
    try:
        options = audit.AuditOptions(grace_ms=0, horizon_ms=round(horizon_s * 1000), skew_ms=CLOCKS_APART_MS)
        audit.run(engine, KafkaSource(DuckReader(engine), access), LocalFolder(str(folder)), options)
    finally:
        engine.close()
    rows: list[Row] = DeltaTable(folder / runs.VERDICTS).to_pyarrow_table().to_pylist()
    return rows


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """The number of transactions that both have judged, and their differences."""

    judged: int
    unknown: int
    """Transactions for which the audit proves nothing: Kafka has removed the evidence."""
    differences: tuple[str, ...]


def agreement(
    rows: Iterable[Row], cases: Mapping[str, Case], findings: Sequence[Finding], *, emptied: frozenset[str]
) -> Agreement:
    """Compare the audit's rows with the checker's cases and findings.

    Emptying a topic (`emptied`) deletes its messages, which the audit calls lost or torn; the checker has read them
    before, so it does not.
    """
    wrong = {finding.id for finding in findings if finding.count in _SEEN}
    seen: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        seen[row["id"]].append(row)
    # What was ended before op was made again has no marker now, or one that names no message: nothing is proved.
    latest = max((op.life for case in cases.values() for op in case.ops), default=0)
    unproved = {
        name
        for name, case in cases.items()
        if case.lost_in_memory
        or case.ended_in_doubt
        or any(op.life < latest or (op.life and not op.messages) for op in case.ends)
    }
    judged = {name: of_id for name, of_id in seen.items() if name not in unproved}
    differences = [
        f"{name}: the audit says {row['verdict']}, the checker {sorted(_outcomes(cases, name)) or 'nothing'}:"
        f" {dict(row)}"
        for name, of_id in judged.items()
        for row in of_id
        if not _agrees(row, _outcomes(cases, name), wrong=name in wrong, emptied=emptied)
    ]
    differences += [
        f"{name}: the checker says {sorted(case.outcomes)}, the audit does not know it"
        for name, case in cases.items()
        if name not in seen and name not in unproved and case.ends
    ]
    differences += [
        f"{name}: the checker finds what the audit does not"
        for name in wrong
        if not any(row["verdict"] in ANOMALIES for row in seen.get(name, ()))
    ]
    every = [row for of_id in seen.values() for row in of_id]
    unknown = sum(row["verdict"] == "expired_unknown" or row["id"] in unproved for row in every)
    return Agreement(judged=len(every), unknown=unknown, differences=tuple(differences))


def _agrees(row: Row, outcomes: set[str], *, wrong: bool, emptied: frozenset[str]) -> bool:
    verdict = row["verdict"]
    if verdict in _MEANS:
        return _MEANS[verdict] in outcomes
    if verdict == "expired_unknown":
        return True
    return wrong or (verdict in {"lost", "torn"} and COMMITTED in outcomes and _only_emptied(row, emptied))


def _only_emptied(row: Row, emptied: frozenset[str]) -> bool:
    """Return whether everything that the audit misses was in emptied topics."""
    missed = [each for each in row["evidence"] or () if each["problem"]]
    return bool(missed) and all(each["problem"] == "missing" and each["topic"] in emptied for each in missed)


def _outcomes(cases: Mapping[str, Case], name: str) -> set[str]:
    return cases[name].outcomes if name in cases else set()
