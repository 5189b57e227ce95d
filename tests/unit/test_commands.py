"""The commands that the pages show: each is one that there is, with options that it takes."""

import re
import shlex
from pathlib import Path

import click
import pytest

from halfway.app.cli.main import halfway

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]  # docs/pipeline.md is about a cluster of yours
PAGES.remove(ROOT / "docs" / "pipeline.md")
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
EXTRAS = {"embedded", "pipeline", "cluster", "dev", "consumer", "django", "sqlalchemy"}
TESTED_ELSEWHERE = {"curl", "python", "py-spy", "export", "until"}


def words_of(page: Path) -> list[list[str]]:
    """Return the words of each command, without variables before it and what follows it."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.partition(" > ")[0] for block in BLOCK.findall(text) for line in block.splitlines()]
    commands = [shlex.split(line[2:].rstrip(" &"), comments=True) for line in lines if line.startswith("$ ")]
    return [words[next(i for i, word in enumerate(words) if "=" not in word) :] for words in commands if words]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_is_one(page: Path) -> None:
    for program, *words in words_of(page):
        if program == "make":
            assert [word for word in words if "=" not in word and word not in TARGETS] == [], words
        elif program == "pip":
            assert words[0] == "install"
            for path, _, extra in (word.partition("[") for word in words[1:]):
                assert (ROOT / path).exists(), path
                assert not extra or extra.rstrip("]") in EXTRAS, extra
        elif program.rpartition("/")[2] == "halfway":
            parse(halfway, words)
        else:
            assert program.rpartition("/")[2] in TESTED_ELSEWHERE, program


def parse(command: click.Command, words: list[str]) -> None:
    """Parse a command line down to its last command, and run nothing."""
    context = command.make_context("halfway", words)
    if isinstance(command, click.Group):
        _, below, rest = command.resolve_command(context, words)
        assert below is not None
        parse(below, rest)
    else:
        assert context.args == [], words
