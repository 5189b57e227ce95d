"""The rules of the audit in DuckDB, on one machine: `python -m bench.pipeline.duckdb_audit SNAPSHOT OUTPUT`.

Left out is what made-up topics do not have: ids that are used again, compacted topics, deletion by age, grace.
Op markers are decoded by the coordinator's pipeline code in one process for each core, as DuckDB reads no Avro values.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from halfway import schemas
from halfway.pipeline.decoding import reader

_FINAL: Final = ("committed", "rolled_back")
_NAMED: Final = pa.schema(
    {name: pa.string() for name in ("id", "outcome", "topic", "key_hash", "value_hash")}
    | {name: pa.int32() for name in ("slot", "total")}
)
_HEADER: Final = "list_filter(headers, lambda each: each.key = '{}')[-1].value"
_AUDIT: Final = f"""
create view message as
select decode({_HEADER.format("halfway-transaction-id")}) as id,
       split_part(decode({_HEADER.format("halfway-message")}), '/', 1)::int as slot,
       split_part(decode({_HEADER.format("halfway-message")}), '/', 2)::int as total,
       topic, hash(sha256(key)[1:32], sha256(value)[1:32]) as content
from read_parquet(getvariable('real'), hive_partitioning = true)
where {_HEADER.format("halfway-transaction-id")} is not null;

create view half as
select decode(key) as id, arg_max(value is not null, "offset") as alive
from read_parquet(getvariable('half')) group by id;

create view place as
select coalesce(named.id, there.id) as id,
       case when named.id is not null and there.id is null then 'missing'
            when named.id is not null and there.found > 1 then 'doubled'
            when named.id is null then 'not named'
            when there.lowest <> named.content or there.highest <> named.content then 'changed'
            when there.least <> named.total or there.most <> named.total then 'miscounted' end as problem,
       named.id is not null as expected
from (select id, slot, total, topic, hash(key_hash, value_hash) as content
      from read_parquet(getvariable('named')) where slot is not null) named
full join (select id, slot, topic, count(*) as found, min(content) as lowest, max(content) as highest,
                  min(total) as least, max(total) as most
           from message group by id, slot, topic) there using (id, slot, topic);

create view event as
select id, problem, expected, null as outcome, false as alive from place
union all select id, null, null, outcome, false from read_parquet(getvariable('named')) where coalesce(slot, 1) = 1
union all select id, null, null, null, alive from half;

create table verdict as
select id, case
    when ends > 1 then 'contradicted'
    when not_named > 0 then 'leaked'
    when committed and missing > 0 and missing = expected then 'lost'
    when committed and (missing > 0 or miscounted > 0) then 'torn'
    when committed and doubled > 0 then 'doubled'
    when committed and changed > 0 then 'payload_changed'
    when committed then 'committed_ok'
    when rolled_back then 'rolled_back_ok'
    when alive then 'pending'
    else 'expired_unknown' end as verdict
from (select id, count(outcome) as ends, count_if(expected) as expected, bool_or(alive) as alive,
             coalesce(bool_or(outcome = 'committed'), false) as committed,
             coalesce(bool_or(outcome = 'rolled_back'), false) as rolled_back,
             count_if(problem = 'missing') as missing, count_if(problem = 'doubled') as doubled,
             count_if(problem = 'changed') as changed, count_if(problem = 'miscounted') as miscounted,
             count_if(problem = 'not named') as not_named
      from event group by id);
"""  # noqa: S608 - no input of anybody's stands in it


def audit(snapshot: Path, output: Path, *, processes: int, memory: str | None = None) -> dict[str, int]:
    """Judge an archive, write the verdicts as Parquet and return how many there are of each.

    Beyond `memory` (as DuckDB is told it: 1GB) it writes to disk; without one it takes what the machine has.
    """
    settings: dict[str, str | bool | int | float | list[str]] = {} if memory is None else {"memory_limit": memory}
    committed = snapshot / "committed"
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        named = Path(scratch, "named")
        named.mkdir()
        ops = sorted((committed / "topic=_halfway.op").glob("*.parquet"))
        decoded = [named / path.name for path in ops]
        if processes > 1:
            with ProcessPoolExecutor(processes, mp_context=get_context("forkserver")) as pool:
                list(pool.map(_decode, ops, decoded))
        else:
            list(map(_decode, ops, decoded))
        # A path is given as a literal: a variable is needed while the views are made.
        with duckdb.connect(config=settings | {"temp_directory": scratch}) as database:
            for name, pattern in (
                ("half", committed / "topic=_halfway.half" / "*.parquet"),
                ("named", named / "*.parquet"),
            ):
                database.execute(f"set variable {name} = '{pattern}'")
            real = [str(topic / "*.parquet") for topic in committed.iterdir() if "=_halfway." not in topic.name]
            database.execute(f"set variable real = {real}")
            for statement in _AUDIT.split(";\n"):
                if statement.strip():
                    database.execute(statement)
            database.execute(f"copy verdict to '{output}' (format parquet)")
            rows: list[tuple[Any, ...]] = database.execute(
                "select verdict, count(*) from verdict group by 1"
            ).fetchall()
    return {str(name): int(count) for name, count in rows}


def _decode(source: Path, target: Path) -> None:
    """Write one row for each message that an outcome names, one without a message for an outcome that names none."""
    read = reader("op", json.dumps(schemas.versions("op")))
    with pq.ParquetWriter(target, _NAMED) as writer:
        for batch in pq.ParquetFile(source).iter_batches(columns=["value"]):
            rows = [row for value in batch.column("value").to_pylist() for row in _rows(read(value))]
            writer.write_table(pa.Table.from_pylist(rows, _NAMED))


def _rows(op: dict[str, Any]) -> list[dict[str, Any]]:
    outcome = op["kind"].lower()
    if outcome not in _FINAL:
        return []
    messages = op["messages"] if outcome == "committed" else []
    if not messages:
        return [{"id": op["id"], "outcome": outcome}]
    return [
        {
            "id": op["id"],
            "outcome": outcome,
            "topic": each["topic"],
            "key_hash": each["key_hash"].hex(),
            "value_hash": each["value_hash"].hex(),
            "slot": slot,
            "total": len(messages),
        }
        for slot, each in enumerate(messages, 1)
    ]


if __name__ == "__main__":
    _, archive, judged, *most = sys.argv
    processors = os.cpu_count() or 1
    print(json.dumps(audit(Path(archive), Path(judged), processes=processors, memory=next(iter(most), None))))
