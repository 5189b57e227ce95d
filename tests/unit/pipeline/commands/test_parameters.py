"""Moments and objectives on the command line."""

import click
import pytest
from click.testing import CliRunner

from halfway.pipeline import cli
from halfway.pipeline.commands.parameters import moment, objective


@pytest.mark.parametrize(
    "text, ms",
    [
        ("2026-01-31", 1_769_817_600_000),
        ("2026-01-31T12:00:00Z", 1_769_860_800_000),
        ("2026-01-31T13:00:00.5+01:00", 1_769_860_800_500),
    ],
)
def test_a_time_is_utc_if_it_names_no_other_zone(text: str, ms: int) -> None:
    """Dates begin at midnight."""
    assert moment(text) == ms


@pytest.mark.parametrize("text, found", [("2", (None, 2_000)), ("shop=0.5", ("shop", 500)), ("a=b=1", ("a=b", 1_000))])
def test_an_objective_is_of_a_group_or_of_all_others(text: str, found: tuple[str | None, int]) -> None:
    """In seconds; a group's name may have the sign too."""
    assert objective(text) == found


@pytest.mark.parametrize("text", ["", "shop=", "shop=never", "0", "shop=-1", "nan", "inf"])
def test_what_is_no_time_is_refused_with_the_remedy(text: str) -> None:
    """As a wrong command."""
    with pytest.raises(click.UsageError, match="give SECONDS, or GROUP=SECONDS"):
        objective(text)
    with pytest.raises(click.UsageError, match="give 2026-01-31 or"):
        moment(text)


@pytest.mark.parametrize("number", ["nan", "inf", "-1"])
@pytest.mark.parametrize(
    "command", [["audit", "--grace-s"], ["audit", "--clock-skew-s"], ["ledger", "--every-s"]], ids=" ".join
)
def test_a_number_of_seconds_that_is_none_is_refused_by_the_name_of_its_option(command: list[str], number: str) -> None:
    """Before anything is read."""
    result = CliRunner().invoke(cli.pipeline, [command[0], "--output", "x", command[1], number])
    assert result.exit_code == 2, result.output
    assert f"Invalid value for '{command[1]}'" in result.stderr
    assert number in result.stderr


@pytest.mark.parametrize(
    "told, remedy",
    [
        (["audit", "--output", "x", "--continue", "--since", "2026-01-31"], "without --since and --until"),
        (["audit", "--output", "x", "--continue", "--snapshot", "y"], "without --snapshot and --offsets"),
        (["audit", "--output", "x", "--since", "2026-01-31", "--until", "2026-01-30"], "give a later one"),
        (["report", "--output", "x", "--audit", "y", "--since", "2026-01-31", "--until", "2026-01-31"], "a later one"),
        (["audit", "--output", "x", "--memory", "lots"], "'lots' is no size: give 512m or 2g"),
        (["sweep", "--output", "x", "--snapshot", "y", "--offsets", "z"], "give one of them"),
        (["report", "--output", "x"], "give --ledger, --audit, --trail or several of them"),
        (["report", "--output", "x", "--audit", "y", "--snapshot", "z"], "give both or neither"),
    ],
)
def test_options_that_contradict_each_other_are_a_wrong_command(told: list[str], remedy: str) -> None:
    """Before anything is read."""
    found = CliRunner().invoke(cli.pipeline, told)
    assert found.exit_code == 2
    assert remedy in found.output
