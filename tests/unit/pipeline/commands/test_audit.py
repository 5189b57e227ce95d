"""The exit status and the words of an audit that could not judge or prove everything."""

from datetime import UTC, datetime
from pathlib import Path

from click.testing import CliRunner

from halfway.kafka.records import codec
from halfway.pipeline import cli
from tests.support.pipeline.archives import REAL, write_archive, write_records
from tests.support.pipeline.logs import PREFIX, START


def test_outcomes_that_nobody_can_read_have_an_exit_status_of_their_own(tmp_path: Path) -> None:
    """An audit that is older than the coordinator finds nothing, and says that it could not."""
    at = datetime.fromtimestamp(START / 1000, UTC)
    headers = codec.record_headers("op", "shop", "committed")
    newer = b"\xc3\x01newer...and what it says"
    write_records(tmp_path / "archive", [(b"x", newer, PREFIX + "op", 0, 0, at, headers)], at=START + 60_000)
    told = ["audit", "--snapshot", str(tmp_path / "archive"), "--output", str(tmp_path / "audit")]
    found = CliRunner().invoke(cli.pipeline, told)
    assert found.exit_code == 3, found.output
    assert "1 outcomes could not be read" in found.output
    chosen = CliRunner().invoke(cli.pipeline, [*told, "--fail-on", "not_judged=2"])
    assert chosen.exit_code == 0, chosen.output
    both = CliRunner().invoke(cli.pipeline, [*told, "--offsets", "offsets.json"])
    assert both.exit_code == 2, "a wrong command"
    assert "give one of them" in both.output


def test_what_cannot_be_proved_is_told_and_fails_only_where_it_is_asked_for(tmp_path: Path) -> None:
    """A message that was lost a minute ago, in a topic that has been emptied, is not called old."""
    write_archive(tmp_path / "archive", fine=(), lost=["gone"], emptied=[REAL])
    told = ["audit", "--snapshot", str(tmp_path / "archive"), "--output", str(tmp_path / "audit")]
    found = CliRunner().invoke(cli.pipeline, told)
    assert found.exit_code == 0, found.output
    assert "1 may be lost or leaked" in found.output
    asked = CliRunner().invoke(cli.pipeline, [*told, "--fail-on", "unproved"])
    assert asked.exit_code == 1, asked.output
