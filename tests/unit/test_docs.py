"""The documentation names what is there: tests, files, headings and settings."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfway.app.settings import NOT_SETTINGS, VARIABLES
from tests.support.structure.settings_table import FIRST, LAST, PAGE, table

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").glob("*.md")])
_TEST = re.compile(r"`(?P<folder>[\w/]*/)?(?P<file>test_\w+\.py)(?:::(?P<name>\w+))?")
_TEST_ALONE = re.compile(r"`(?P<name>test_\w+)[`\[]")
_LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
_CITED = re.compile(r"(?P<page>docs/[\w-]+\.md)(?:#(?P<anchor>[\w-]+))?")
_SETTING = re.compile(r"HALFWAY_[A-Z0-9_]+[A-Z0-9]")
_PATH = re.compile(r"`(?P<path>[\w/]+(?:\.py|/))`")
_MEMBER = re.compile(r"`(?P<owner>[A-Z]\w+)\.(?P<name>\w+)`")
_OTHERS = re.compile(r"HALFWAY_(KAFKA(__|$)|TEST_|PIPELINE_|CLIENT_)")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def _lines(page: Path) -> Iterator[tuple[int, str]]:
    yield from enumerate(page.read_text(encoding="utf-8").splitlines(), 1)


def _anchors(page: Path) -> set[str]:
    """Give the anchors of a page's headings, as GitHub makes them."""
    headings = [line.lstrip("#").strip().lower() for _, line in _lines(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def _files(folder: str | None, name: str) -> list[Path]:
    """Give the files of a name: in the folder that is named with it, anywhere in `tests/acceptance` without one."""
    return list((ROOT / folder).glob(name) if folder else (ROOT / "tests" / "acceptance").rglob(name))


@pages
def test_every_test_that_is_named_exists(page: Path) -> None:
    """By its file, in `tests/acceptance` where no folder is named, and by its function."""
    missing = []
    everything = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for number, line in _lines(page):
        for named in _TEST.finditer(line):
            found = [path.read_text(encoding="utf-8") for path in _files(named["folder"], named["file"])]
            if not any(not named["name"] or f"def {named['name']}(" in text for text in found):
                missing.append(f"line {number}: {named[0]}")
        missing += [
            f"line {number}: {named['name']}"
            for named in _TEST_ALONE.finditer(line)
            if f"def {named['name']}(" not in everything
        ]
    assert not missing, missing


def test_every_threat_names_the_test_that_shows_what_stops_it() -> None:
    """Each row of a table of threats ends with tests that there are, by file and function, or a whole file."""
    page = ROOT / "docs" / "security.md"
    rows = 0
    threats = False
    for _, line in _lines(page):
        threats = line.endswith("| test |") or (threats and line.startswith("|"))
        if not threats or line.endswith("| test |") or line.startswith("| ---"):
            continue
        rows += 1
        named = list(_TEST.finditer(line.rsplit(" | ", 1)[1]))
        there = [
            one
            for one in named
            if one["folder"]
            and (path := ROOT / one["folder"] / one["file"]).exists()
            and f"def {one['name'] or 'test_'}" in path.read_text(encoding="utf-8")
        ]
        assert named, line
        assert there == named, line
    assert rows > 20


@pages
def test_every_link_leads_somewhere(page: Path) -> None:
    """To a file of the repository, and to a heading where one is named."""
    broken = []
    for number, line in _lines(page):
        for link in _LINK.finditer(line):
            target = (page.parent / link["path"]).resolve() if link["path"] else page
            if not target.exists() or (link["anchor"] and link["anchor"] not in _anchors(target)):
                broken.append(f"line {number}: {link[0]}")
    assert not broken, broken


def _code() -> Iterator[Path]:
    """Give the sources that say where the documentation has more: code, tests, schemas, the model."""
    for folder in ("adapters", "coordinator", "pipeline", "schemas", "tests", "bench", "checker", "examples", "model"):
        for suffix in (".py", ".pml", ".avsc"):
            yield from (ROOT / folder).rglob(f"*{suffix}")


def test_every_page_that_code_cites_exists() -> None:
    """By its file, and by its heading where one is cited."""
    anchors = {page.relative_to(ROOT).as_posix(): _anchors(page) for page in PAGES}
    broken = [
        f"{path.relative_to(ROOT)} line {number}: {cited[0]}"
        for path in _code()
        for number, line in _lines(path)
        for cited in _CITED.finditer(line)
        if cited["page"] not in anchors or (cited["anchor"] and cited["anchor"] not in anchors[cited["page"]])
    ]
    assert not broken, broken


@pages
def test_every_setting_that_is_named_is_one(page: Path) -> None:
    known = VARIABLES.keys() | NOT_SETTINGS
    unknown = [
        f"line {number}: {name}"
        for number, line in _lines(page)
        for name in _SETTING.findall(line)
        if name not in known and not _OTHERS.match(name)
    ]
    assert not unknown, unknown


def test_the_table_of_settings_is_that_of_the_model() -> None:
    """If it is not: `python -m tests.support.structure.settings_table`."""
    assert f"{FIRST}{table()}{LAST}" in PAGE.read_text(encoding="utf-8")


def test_the_map_names_files_and_methods_that_exist() -> None:
    """Without a link too: a file or folder by the end of its path, a method by its class."""
    page = ROOT / "docs" / "architecture.md"
    sources = list(_code())
    paths = [f"/{path.relative_to(ROOT)}" for path in sources]
    modules = [path.read_text(encoding="utf-8") for path in sources if path.suffix == ".py"]
    missing = []
    for number, line in _lines(page):
        missing += [
            f"line {number}: {named[0]}"
            for named in _PATH.finditer(line)
            if not any(path.endswith(f"/{named['path']}") or f"/{named['path'].rstrip('/')}/" in path for path in paths)
        ]
        missing += [
            f"line {number}: {named[0]}"
            for named in _MEMBER.finditer(line)
            if not any(f"class {named['owner']}" in code and f"def {named['name']}(" in code for code in modules)
        ]
    assert not missing, missing
