"""Build the site of the pages: `make docs`. Strict: a broken link, or a file that would ask another host, ends it.

1. Copy the pages, with the README as the first, and the files that they link to; what is not a page becomes plain text.
2. Zensical writes the site from them.
3. Add the API reference, as the coordinator serves it at /docs/, beside the description of the API.
"""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

from jgo.maven import MavenContext

from halfway.http.handlers.openapi import document

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "coordinator" / "halfway" / "http" / "console" / "static"
MERMAID = "11.6.0"
MERMAID_SHA256 = "3a93016a73dc82ba890d919f9bbb176f3da9d98341650c0b517f2595cc68fef8"
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")


def main(build: Path) -> None:
    """Write the site to `build/site`."""
    pages, site = build / "site-pages", build / "site"
    build.mkdir(exist_ok=True)
    for folder in (pages, site):
        shutil.rmtree(folder, ignore_errors=True)
    copy_pages(pages)
    (build / "zensical.toml").write_bytes(Path(__file__).with_name("zensical.toml").read_bytes())
    zensical = Path(sys.executable).with_name("zensical")
    subprocess.run([zensical, "build", "--strict", "--clean", "--config-file", "zensical.toml"], cwd=build, check=True)  # noqa: S603
    copy_reference(site)
    if faults := [*broken_links(site), *other_hosts(site)]:
        raise SystemExit("\n".join(faults))


def copy_pages(pages: Path) -> None:
    """Copy the pages to where their links between each other hold, and the pictures and files that they show."""
    places = {path: Path(path.name) for path in (ROOT / "docs").glob("*.md")}
    places |= {path: Path("deploy", path.name) for path in (ROOT / "deploy").glob("*.md")}
    places[ROOT / "README.md"] = Path("index.md")
    for source, place in places.items():
        target = pages / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_linked(source, place, places), encoding="utf-8")
    shutil.copytree(ROOT / "docs" / "console", pages / "console")
    for picture in (ROOT / "docs").glob("*.png"):
        shutil.copy(picture, pages)
    (pages / "docs").mkdir()
    (pages / "docs" / "index.html").touch()  # replaced by the reference; the navigation names it
    (pages / "javascripts").mkdir()
    (pages / "javascripts" / "mermaid.min.js").write_bytes(mermaid())


def _linked(source: Path, place: Path, places: dict[Path, Path]) -> str:
    """Return a page with its links as they are in the site."""

    def link(match: re.Match[str]) -> str:
        target = (source.parent / match["path"]).resolve()
        if target.suffix == ".png":
            return match[0]
        if target not in places:
            if not target.exists():
                raise SystemExit(f"{source}: there is no {match['path']}")
            return f"`{target.relative_to(ROOT)}`" if match["text"] in match["path"] else match["text"]
        up = "../" * (len(place.parts) - 1)
        return f"[{match['text']}]({up}{places[target].as_posix()}{match['anchor'] or ''})"

    return _LINK.sub(link, source.read_text(encoding="utf-8"))


def mermaid() -> bytes:
    """Return the script that draws the diagrams: from its package, by name, once."""
    jar = MavenContext().project("org.webjars.npm", "mermaid").at_version(MERMAID).artifact().resolve()
    with zipfile.ZipFile(jar) as packed:
        script = packed.read(f"META-INF/resources/webjars/mermaid/{MERMAID}/dist/mermaid.min.js")
    if sha256(script).hexdigest() != MERMAID_SHA256:
        raise SystemExit(f"{jar} does not have the script that was expected")
    return script


def copy_reference(site: Path) -> None:
    """Copy the reference, with what it takes from the console, and write the description that it reads."""
    for name in ("docs", "tokens.css", "theme.js", "icon.svg", "vendor"):
        source, target = STATIC / name, site / ("docs" if name == "docs" else f"console/{name}")
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)
    (site / "openapi.json").write_text(json.dumps(document()), encoding="utf-8")


class _Page(HTMLParser):
    """Collects what a page links to, what it loads, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if "href" in given:
            (self.links if tag == "a" else self.loaded).append(given["href"])
        if "src" in given:
            self.loaded.append(given["src"])


def _parsed(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def broken_links(site: Path) -> list[str]:
    """Return what leads nowhere in the site as it was written."""
    pages = {path: _parsed(path) for path in site.rglob("*.html") if path.name != "404.html"}
    faults = []
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            name, _, anchor = link.partition("#")
            if ":" in name or link.startswith("//"):
                continue
            target = (path.parent / unquote(name)).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            known = pages.get(target)
            if not target.exists() or (anchor and known and anchor != "__top" and unquote(anchor) not in known.anchors):
                faults.append(f"{path.relative_to(site)}: {link} leads nowhere")
    return faults


def other_hosts(site: Path) -> list[str]:
    """Return what a page would load from another host."""
    faults = []
    for path in site.rglob("*"):
        if path.suffix == ".html":
            outside = [one for one in _parsed(path).loaded if re.match(r"(https?:)?//", one)]
        elif path.suffix == ".css":
            outside = re.findall(r"url\([\"']?(?:https?:)?//[^)]*", path.read_text(encoding="utf-8"))
        else:
            continue
        faults += [f"{path.relative_to(site)} loads {one}" for one in outside]
    return faults


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build"
    main(folder)
    print(f"{folder}/site: see it with python3 -m http.server --directory {folder}/site")
