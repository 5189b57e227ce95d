"""The report: one page that needs nothing else."""

import html
import json
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from halfway.kafka.records import codec
from halfway.pipeline import tables as runs
from halfway.pipeline.engines.decoding import arrow_of
from halfway.pipeline.engines.dialect import Frame, Once
from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.engines.engine import Engine, SparkEngine
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.jobs import ledger, report
from halfway.pipeline.sources.duckdb import DuckReader
from halfway.pipeline.sources.pinned import Archive
from halfway.pipeline.tables import Folder, LocalFolder
from halfway.pipeline.transforms.verdict import VERDICTS
from tests.support.pipeline.archives import PREFIX, write_records
from tests.support.records.samples import AUDIT_EVENT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

START = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
UGLY = "<script>alert(1)</script>"
ENDED = (
    "id string, `group` string, outcome string, cause string, prepared_at bigint, ended_at bigint, "
    "latency_ms bigint, checks int, topics array<string>, messages int, size bigint, shard int, op_offset bigint"
)


PLACES = "array<struct<partition: int, offset: bigint>>"
FOUND = (
    "verdict string, id string, `group` string, topics array<string>, expected int, found int, "
    "prepared_at bigint, ended_at bigint, "
    f"evidence array<struct<topic: string, slot: int, problem: string, found: int, places: {PLACES}>>"
)
SPLIT = (UGLY, "shop", "shop")


def rows_of(page: str, heading: str) -> list[dict[str, str]]:
    """Return the rows of the table under a heading by the names of their columns."""
    table = page.partition(f"<h2>{heading}</h2>")[2].partition("<h2>")[0]
    names = re.findall(r"<th[^>]*>(?:<span.*?</span> )?([^<]*)</th>", table)
    rows = re.findall(r"<tr>(<td.*?)</tr>", table, flags=re.DOTALL)
    return [dict(zip(names, re.findall(r"<td[^>]*>(?:<i.*?</i>)*([^<]*)</td>", row), strict=True)) for row in rows]


def frame_of(engine: Engine, rows: Sequence[tuple[Any, ...]], columns: str) -> Frame:
    """Return rows whose times are timestamps."""
    in_ms = [tuple(round(cell.timestamp() * 1000) if isinstance(cell, datetime) else cell for cell in row)
             for row in rows]  # fmt: skip
    names = {f'"{name}"': name for name in arrow_of(columns).names}
    shown = (f"timestamp_millis({name})" if text.endswith("ed_at") else name for name, text in names.items())
    items = ", ".join(f"{each} as {name}" for each, name in zip(shown, names, strict=True))
    return engine.query(f"select {items} from $rows", rows=engine.table(in_ms, columns))  # noqa: S608


def write_ledger(engine: Engine, folder: Path, *, step: int = 2) -> None:
    """Three minutes of two groups. The name of one is HTML."""
    rows = []
    for number in range(90):
        group = SPLIT[number % len(SPLIT)]
        outcome, cause = ("committed", "producer") if number % 2 else ("rolled_back", "check")
        ended = START + timedelta(seconds=step * number)
        rows.append((f"tx-{number}", group, outcome, cause, ended, ended, number * 10, 1, ["orders"], 1, 5, 0, number))
    batch = Once("ledger", 0)
    LocalFolder(str(folder)).write(json.dumps({"id": batch.application}), ledger.CHECKPOINT, "metadata")
    engine.save(frame_of(engine, rows, ENDED), str(folder / ledger.ENDED), once=batch)
    open_still = [("p-1", "shop", "parked", round(START.timestamp() * 1000), 0, 1)]
    columns = "id string, `group` string, state string, since bigint, shard int, `offset` bigint"
    engine.save(engine.table(open_still, columns), str(folder / ledger.PENDING), once=batch)


def written(write: Callable[..., None], *given: Any, **options: Any) -> None:
    """Write tables without Spark."""
    engine = DuckEngine()
    try:
        write(engine, *given, **options)
    finally:
        engine.close()


def run(sources: report.Sources, output: LocalFolder, wanted: report.Wanted | None = None) -> str:
    """Make a report without Spark."""
    engine = DuckEngine()
    try:
        return report.run(engine, sources, output, wanted or report.Wanted())
    finally:
        engine.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a report of a running ledger, made on a machine in another time zone."""
    folder = tmp_path_factory.mktemp("made")
    of_ledger = report._of_ledger

    def while_it_runs(*given: Any) -> dict[str, Any]:
        for name in (ledger.ENDED, ledger.PENDING):
            table, engine = str(folder / "ledger" / name), given[0]
            engine.save(engine.load(table), table, once=Once("ledger", 1))
        return of_ledger(*given)

    written(write_ledger, folder / "ledger")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        patch.setattr(report, "_of_ledger", while_it_runs)
        time.tzset()
        run(report.Sources(ledger=LocalFolder(str(folder / "ledger"))), LocalFolder(str(folder)))
    time.tzset()
    return folder


def test_the_page_shows_what_the_ledger_holds_and_needs_nothing_else(made: Path) -> None:
    """It contains bars and tables, and loads nothing else. Names of groups are always text."""
    page = (made / report.PAGE).read_text()
    who = [(row["who"], row["committed"], row["rolled back"]) for row in rows_of(page, "Who ended them")]
    assert who[:2] == [("producer", "45", "0"), ("check-back", "0", "45")]
    times = {row["time"]: row["producer"] for row in rows_of(page, "Time from prepare to outcome")}
    assert times == {
        "up to 10 ms": "1",
        "up to 30 ms": "1",
        "up to 100 ms": "3",
        "up to 300 ms": "10",
        "up to 1 s": "30",
    }
    assert page.count("width: 100.00%") == 2, "the longest bars, of two causes"
    assert "<b>45</b>committed" in page
    assert "<b>45</b>rolled back" in page
    assert "<b>1</b>parked" in page
    assert UGLY not in page
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!#)""", page) == []
    assert "<script" not in page
    assert "@import" not in page


def test_the_page_gives_the_figures_of_each_group(made: Path) -> None:
    """The slowest first."""
    rows = rows_of((made / report.PAGE).read_text(), "Slowest groups")
    assert [(row["group"], row["transactions"], row["half within"]) for row in rows] == [
        ("shop", "60", "450 ms"),
        (html.escape(UGLY), "30", "435 ms"),
    ]


def test_times_are_utc_wherever_the_report_is_made(made: Path) -> None:
    """The page's own, and those of its tables."""
    page = (made / report.PAGE).read_text()
    assert "from 2026-01-02 03:04:00 to 2026-01-02 03:06:58" in page
    times = [row["from"] for row in rows_of(page, "Outcomes over time")]
    assert times == [f"2026-01-02 03:0{minute}" for minute in (4, 5, 6)]
    assert "2026-01-02 12:0" not in page


def test_a_long_time_is_told_in_longer_steps(tmp_path: Path) -> None:
    """Ninety days by the week, those without an outcome too: by the minute they would be a hundred thousand rows."""
    written(write_ledger, tmp_path / "ledger", step=86_400)
    path = run(report.Sources(ledger=LocalFolder(str(tmp_path / "ledger"))), LocalFolder(str(tmp_path)))
    rows = rows_of(Path(path).read_text(), "Outcomes over time")
    times = [datetime.fromisoformat(row["from"]) for row in rows]
    assert {after - before for before, after in pairwise(times)} == {timedelta(days=7)}
    assert sum(int(row["committed"]) + int(row["rolled back"]) for row in rows) == 90


def write_audit(engine: Engine, folder: Path, doubled: int, *, quarantined: int = 0) -> None:
    """As many doubled transactions, the first of them a hundred times."""
    problems = [
        ("orders", 1, "doubled", count, [(0, offset) for offset in range(count)])
        for count in (100, *(2 for _ in range(doubled - 1)))
    ]
    rows = [
        ("doubled", f"tx-{n:04}", "shop", ["orders"], 1, each[3], START, START + timedelta(minutes=n), [each])
        for n, each in enumerate(problems)
    ]
    found = frame_of(engine, rows, FOUND)
    tables = runs.Tables(engine, LocalFolder(str(folder)))
    tables.begin(anew=True)
    for name in (runs.ANOMALIES, runs.VERDICTS):
        tables.write(name, found)
    counts = dict.fromkeys(VERDICTS, 0) | {"doubled": doubled, "committed_ok": 5}
    proved = {"orders": round(START.timestamp() * 1000), "mails": 0}
    summary = {**counts, "quarantined": quarantined, "judged_at": 1_750_000_000_000, "provable_since": proved}
    tables.end({"summary": summary}, at=0)


def test_the_page_says_of_how_many_anomalies_it_shows_the_first(engine: DuckEngine, tmp_path: Path) -> None:
    """And how many records could not be read."""
    write_audit(engine, tmp_path / "audit", 600, quarantined=3)
    path = run(report.Sources(audit=LocalFolder(str(tmp_path / "audit"))), LocalFolder(str(tmp_path / "report")))
    page = Path(path).read_text()
    assert "<b>600</b>anomalies among 605" in page
    assert "The first 100 of 600." in page
    assert "tx-0099" in page
    assert "tx-0100" not in page
    assert "doubled at 0@0, 0@1, 0@2, 0@3, 0@4, and 95 more" in page
    assert "3 records could not be read by the audit" in page


def test_an_audit_that_was_not_finished_is_none(engine: DuckEngine, tmp_path: Path) -> None:
    """Its tables count when its state is written."""
    folder = LocalFolder(str(tmp_path))
    runs.Tables(engine, folder).begin()
    with pytest.raises(PipelineError, match="holds no audit that was finished"):
        run(report.Sources(audit=folder), LocalFolder(str(tmp_path / "report")))


def test_without_a_ledger_the_remedy_is_told(tmp_path: Path) -> None:
    """An empty folder is no empty ledger."""
    with pytest.raises(PipelineError, match="run halfway-pipeline ledger first"):
        run(report.Sources(ledger=LocalFolder(str(tmp_path))), LocalFolder(str(tmp_path / "report")))


def test_a_part_of_the_time_and_objectives_of_groups_can_be_told(engine: DuckEngine, tmp_path: Path) -> None:
    """Of the ledger by its outcomes' times, of the audit too; a group whose objective is missed is counted."""
    write_ledger(engine, tmp_path / "ledger")
    write_audit(engine, tmp_path / "audit", 5)
    since = round((START + timedelta(minutes=1)).timestamp() * 1000)
    wanted = report.Wanted(since_ms=since, until_ms=since + 60_000, objectives={"shop": 10_000, None: 500})
    sources = report.Sources(ledger=LocalFolder(str(tmp_path / "ledger")), audit=LocalFolder(str(tmp_path / "audit")))
    page = Path(run(sources, LocalFolder(str(tmp_path / "report")), wanted)).read_text()
    assert "<b>1</b>anomalies among 1" in page
    assert "<b>1</b>groups missed their objective" in page
    assert "from 2026-01-02 03:05:00 to 2026-01-02 03:05:58" in page
    groups = {row["group"]: (row["objective"], row["ended within it"]) for row in rows_of(page, "Slowest groups")}
    # Every third from the 30th on, of ten milliseconds each: those up to 500 ms.
    assert groups == {"shop": ("10 s", "100.0%"), html.escape(UGLY): ("500 ms", "70.0%")}


def test_what_a_later_run_has_written_is_not_counted_before_it_ends(engine: DuckEngine, tmp_path: Path) -> None:
    """The report reads the versions that the state names."""
    folder = LocalFolder(str(tmp_path / "audit"))
    write_audit(engine, tmp_path / "audit", 5)
    later = runs.Tables(engine, folder)
    later.begin()
    later.write(runs.VERDICTS, later.read(runs.VERDICTS))
    page = Path(run(report.Sources(audit=folder), LocalFolder(str(tmp_path / "report")), report.Wanted(since_ms=0)))
    assert "anomalies among 5" in page.read_text()


def test_the_page_shows_who_did_what_and_obeys_no_name(engine: DuckEngine, tmp_path: Path) -> None:
    """Registered, changed, ended manually, resumed, keys: the newest first, each once, always as text."""
    events = [
        msgspec.structs.replace(
            AUDIT_EVENT, id=f"event-{number}", at=AUDIT_EVENT.at + number, action=action, remark=UGLY, detail="=1+2"
        )
        for number, action in enumerate(("register_group", "end_by_hand", "resume", "create_key", "revoke_key"))
    ]
    records: list[tuple[Any, ...]] = [
        (b"k", codec.encode_audit(event), PREFIX + "audit", 0, offset, START, [])
        for offset, event in enumerate([*events, events[0]])
    ]
    write_records(tmp_path / "archive", records, at=AUDIT_EVENT.at + 60_000)
    sources = report.Sources(trail=Archive(DuckReader(engine), LocalFolder(str(tmp_path / "archive"))))
    page = Path(report.run(engine, sources, LocalFolder(str(tmp_path / "report")))).read_text()
    assert UGLY not in page
    assert page.count("&lt;script&gt;") == len(events)
    told = rows_of(page, "Who did what")
    assert [row["action"] for row in told] == [event.action for event in reversed(events)]
    assert {row["actor"] for row in told} == {f"{AUDIT_EVENT.actor_kind} {AUDIT_EVENT.actor}"}


def test_both_engines_make_the_same_report(spark: "SparkSession", engine: DuckEngine, tmp_path: Path) -> None:
    """With objectives and a part of the time, to the letter."""
    write_ledger(SparkEngine(spark), tmp_path / "ledger")
    write_audit(SparkEngine(spark), tmp_path / "audit", 5)
    since = round((START + timedelta(minutes=1)).timestamp() * 1000)
    wanted = report.Wanted(since_ms=since, objectives={"shop": 10_000, UGLY: 20})
    for name, made, opened in (("spark", SparkEngine(spark), partial(Folder, spark)), ("duckdb", engine, LocalFolder)):
        sources = report.Sources(ledger=opened(str(tmp_path / "ledger")), audit=opened(str(tmp_path / "audit")))
        report.run(made, sources, opened(str(tmp_path / name)), wanted)
    pages = [(tmp_path / name / report.PAGE).read_text() for name in ("spark", "duckdb")]
    one, other = (re.sub(r"Made [-0-9: ]+ from", "", page) for page in pages)
    assert one == other


def test_the_page_gives_times_of_anomalies_and_a_meaning_for_every_verdict(engine: DuckEngine, tmp_path: Path) -> None:
    """When they were prepared and when they ended, in UTC; and in which topic losses are proved only since when."""
    write_audit(engine, tmp_path / "audit", 2)
    page = Path(run(report.Sources(audit=LocalFolder(str(tmp_path / "audit"))), LocalFolder(str(tmp_path)))).read_text()
    told = re.findall(r"<td[^>]*>(\w+)</td><td class=\"n\">[\d,]+</td><td>([^<]*)</td>", page)
    assert {name for name, meaning in told if meaning} == {*VERDICTS}
    assert re.findall(r"In (.*) any loss is proved since (.*)\.<", page) == [("orders", "2026-01-02 03:04:00")]
    assert 'class="prepared_at">2026-01-02 03:04:00</td><td class="ended_at">2026-01-02 03:05:00</td>' in page
