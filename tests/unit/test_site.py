"""The site of the pages, as `make docs` builds it."""

from pathlib import Path

import pytest

from docs.site.build import broken_links, main, other_hosts


def test_the_site_builds_without_a_broken_link_and_asks_no_other_host(tmp_path: Path) -> None:
    main(tmp_path)
    site = tmp_path / "site"
    assert len(list(site.glob("*.html"))) > 10
    assert {path.name for path in (site / "docs").iterdir()} == {"index.html", "reference.css", "reference.js"}
    assert (site / "openapi.json").stat().st_size > 10_000


@pytest.mark.parametrize(
    "html, fault",
    [
        ('<a href="b.html">', "a.html: b.html leads nowhere"),
        ('<a href="#b"><p id="c">', "a.html: #b leads nowhere"),
        ('<script src="https://cdn.example/x.js">', "a.html loads https://cdn.example/x.js"),
        ('<link href="//fonts.example/x.css">', "a.html loads //fonts.example/x.css"),
        ('<a href="https://kafka.example/"><a href="#c"><p id="c"><img src="a.html">', None),
    ],
)
def test_a_broken_link_and_another_host_end_the_build(tmp_path: Path, html: str, fault: str | None) -> None:
    (tmp_path / "a.html").write_text(html, encoding="utf-8")
    assert [*broken_links(tmp_path), *other_hosts(tmp_path)] == ([] if fault is None else [fault])
