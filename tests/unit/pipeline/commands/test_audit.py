"""The exit status of an audit that could not judge everything."""

from datetime import UTC, datetime
from pathlib import Path

from click.testing import CliRunner

from halfway.kafka.records import codec
from halfway.pipeline import cli
from tests.support.pipeline.archives import write_records
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
