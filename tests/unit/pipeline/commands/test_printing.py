"""What the jobs print for people."""

import pytest

from halfway.pipeline.commands.printing import print_table


def test_a_name_that_others_wrote_is_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a record in the internal topics that is not halfway's."""
    print_table(["group", "pending"], [["shop", "1"], ["\x1b]0;title\x07\nno row \u202e", "12"]])
    heading, first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["shop", "1"]
    assert second.isprintable()
    assert r"\x1b]0;title\x07\nno row \u202e" in second
    assert len(heading) == len(first) == len(second)
