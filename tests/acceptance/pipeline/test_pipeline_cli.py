"""The command line of the Spark jobs: its output, exit status, and errors."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from halfway.pipeline.engines import dialect
from halfway.pipeline.transforms.verdict import VERDICTS
from tests.support.pipeline.archives import HISTORY, verdicts_in, verdicts_of, write_archive
from tests.support.pipeline.fixtures import QUICK, Command, as_options, without_spark

SMALL = ("--memory", "1g", "--master", "local[1]", *as_options(QUICK | {"spark.sql.shuffle.partitions": "1"}))

pytestmark = pytest.mark.timeout(1800)


def pipeline(*arguments: str, settings: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "halfway.pipeline", *arguments],
        env=without_spark() | dict(settings or {}),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def test_audit_prints_one_line_and_exits_1_on_anomalies_and_report_shows_them(command: Command, tmp_path: Path) -> None:
    """From an archive to the page: counts by verdict as JSON, the exit status, and the anomaly with its evidence."""
    write_archive(tmp_path / "archive", **HISTORY)
    audited = command("audit", "--snapshot", str(tmp_path / "archive"), "--output", str(tmp_path / "audit"), "--json")
    assert audited.exit_code == 1, audited.stderr
    counts = json.loads(audited.stdout)
    assert {name: count for name, count in counts.items() if count} == {"committed_ok": 200, "lost": 2, "doubled": 1}
    assert verdicts_in(tmp_path / "audit") == verdicts_of(**HISTORY)
    reported = command("report", "--audit", str(tmp_path / "audit"), "--output", str(tmp_path / "report"))
    assert reported.exit_code == 0, reported.output
    page = (tmp_path / "report" / "report.html").read_text()
    assert "gone-1" in page
    assert "message 1 of orders missing" in page


def test_audit_exits_0_where_all_is_well_and_prints_a_table(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each verdict with its count, and nothing about anomalies."""
    monkeypatch.setattr(dialect, "EVERY_S", 3600)  # a slow machine would tell its progress
    write_archive(tmp_path / "archive", fine=["fine-1", "fine-2"], open_still=["open-1"])
    audited = command("audit", "--snapshot", str(tmp_path / "archive"), "--output", str(tmp_path / "audit"))
    assert (audited.exit_code, audited.stderr) == (0, "")
    header, *lines = (line.split() for line in audited.stdout.splitlines())
    assert header == ["verdict", "transactions"]
    counts = dict.fromkeys(VERDICTS, "0") | {"committed_ok": "2", "pending": "1"}
    assert lines == [[name, count] for name, count in counts.items()]


def test_without_java_the_command_says_what_to_install(tmp_path: Path) -> None:
    """Exit status 2 and one line with the remedy, no traceback."""
    settings = {"JAVA_HOME": str(tmp_path), "HALFWAY_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:9"}
    failed = pipeline("sweep", "--output", str(tmp_path), settings=settings)
    assert failed.returncode == 2
    assert "openjdk-17" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_missing_setting_is_named_before_spark_starts(tmp_path: Path) -> None:
    """The most common mistake is reported without a wait."""
    failed = pipeline("audit", "--output", str(tmp_path))
    assert failed.returncode == 2
    assert "HALFWAY_KAFKA__BOOTSTRAP_SERVERS" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_horizon_of_nothing_is_refused(tmp_path: Path) -> None:
    """Like the coordinator: exit status 2 and the name of the setting."""
    settings = {"HALFWAY_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1", "HALFWAY_OUTCOME_HORIZON_S": "0"}
    failed = pipeline("audit", "--output", str(tmp_path), settings=settings)
    assert failed.returncode == 2
    assert "HALFWAY_OUTCOME_HORIZON_S" in failed.stderr


def test_the_coordinators_file_says_when_a_transaction_is_due(command: Command, tmp_path: Path) -> None:
    """By its first check; the environment overrides it, as for the coordinator."""
    write_archive(tmp_path / "archive", fine=["ended-1"], open_still=["open-1"])
    (tmp_path / "halfway.toml").write_text("[policy]\nfirst_check_after_s = 86400\n")
    job = ("sweep", "--snapshot", str(tmp_path / "archive"), "--output", str(tmp_path / "sweep"), "--json")
    with_file = (*job, "--config", str(tmp_path / "halfway.toml"))
    told = {"HALFWAY_POLICY__FIRST_CHECK_AFTER_S": "1"}
    runs = (command(*job), command(*with_file), command(*with_file, **told))
    due = [json.loads(run.stdout)[0]["due"] for run in runs]
    assert due == [1, 0, 1]


def test_a_sweep_tells_and_fails_if_a_transaction_is_overdue(command: Command, tmp_path: Path) -> None:
    """It is pending long after its group's policy should have given it up. The metrics say so in any case."""
    write_archive(tmp_path / "archive", fine=["ended-1"], open_still=["open-1"])
    job = ("sweep", "--snapshot", str(tmp_path / "archive"), "--output", str(tmp_path / "sweep"), "--fail-on-overdue")
    settings = "outcome_horizon_s = 10\n[policy]\nfirst_check_after_s = 1\nmax_age_s = 2\n"
    (tmp_path / "halfway.toml").write_text(settings)
    figures = tmp_path / "sweep.prom"
    strict = ("--config", str(tmp_path / "halfway.toml"), "--metrics", str(figures))
    assert command(*job).exit_code == 0
    assert command(*job, *strict).exit_code == 1
    assert 'halfway_sweep_overdue{age="1 to 10 min",group="shop"} 1.0' in figures.read_text().splitlines()


@pytest.mark.parametrize(
    "job, file",
    [("audit", "halfway.toml"), ("sweep", "offsets.json")],
    ids=["before Spark starts", "while Spark works"],
)
def test_an_interrupted_job_does_not_exit_as_if_it_had_found_anomalies(tmp_path: Path, job: str, file: str) -> None:
    """Ctrl-C is 130, as for any command, and one line."""
    os.mkfifo(tmp_path / file)
    given = {"audit": ("--config", str(tmp_path / file)), "sweep": ("--snapshot", str(tmp_path))}[job]
    command = [sys.executable, "-m", "halfway.pipeline", job, "--output", str(tmp_path), *given, *SMALL]
    # When it can be opened, the job has opened it too, and waits for data.
    # A shell ignores the signal for background processes, and the tests may be one.
    heeding = ["env", "--default-signal=INT", *command]
    with subprocess.Popen(heeding, stderr=subprocess.PIPE, env=without_spark()) as process:
        with (tmp_path / file).open("w"):
            process.send_signal(signal.SIGINT)
        # A signal that arrives just before the job's read() does not interrupt it; the end of the file does.
        _, told = process.communicate(timeout=800)
    assert process.returncode == 130
    assert f"halfway-pipeline {job}: interrupted".encode() in told
    assert b"Traceback" not in told
