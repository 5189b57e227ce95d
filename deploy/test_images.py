"""`make pin-images` pins what a registry has, a real one (crane's); it needs crane."""

import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfway.embedded.broker import pick_port

PIN = Path(__file__).parents[1] / "packaging" / "pin_images.sh"


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def registry() -> Iterator[str]:
    address = f"127.0.0.1:{pick_port()}"
    with subprocess.Popen(["crane", "registry", "serve", "--address", address], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b"serving on" in process.stderr.readline()
        yield address
        process.terminate()


def push(image: str, content: Path) -> str:
    """Push an image with one file, and return its digest."""
    layer = content.with_suffix(".tar")
    with tarfile.open(layer, "w") as archive:
        archive.add(content, content.name)
    run("crane", "append", "--new_layer", layer, "--new_tag", image)
    return run("crane", "digest", image).strip()


def test_images_get_the_digests_of_their_tags_and_newer_ones_later(registry: str, tmp_path: Path) -> None:
    """Those of ours have none; of two tags one of which begins as the other each gets its own."""
    content, app, slim = tmp_path / "content", f"{registry}/lib/app:1.0", f"{registry}/lib/app:1.0-slim"
    content.write_text("one", encoding="utf-8")
    first = push(app, content)
    content.write_text("two", encoding="utf-8")
    other = push(slim, content)
    files = tmp_path / "Dockerfile", tmp_path / "compose.yml"
    files[0].write_text(f"FROM {app} AS build\nFROM {slim}\nFROM build AS last\n", encoding="utf-8")
    files[1].write_text(f"    image: {app}\n    image: halfway:dev\n", encoding="utf-8")
    run(PIN, *files)
    pinned = f"FROM {app}@{first} AS build\nFROM {slim}@{other}\nFROM build AS last\n"
    assert files[0].read_text(encoding="utf-8") == pinned
    assert files[1].read_text(encoding="utf-8") == f"    image: {app}@{first}\n    image: halfway:dev\n"

    content.write_text("three", encoding="utf-8")
    later = push(app, content)
    run(PIN, *files)
    assert files[0].read_text(encoding="utf-8") == pinned.replace(first, later)


def test_nothing_is_changed_if_a_registry_does_not_have_one(registry: str, tmp_path: Path) -> None:
    content, file = tmp_path / "content", tmp_path / "Dockerfile"
    content.write_text("one", encoding="utf-8")
    push(f"{registry}/app:1", content)
    text = f"FROM {registry}/app:1\nFROM {registry}/missing:1\n"
    file.write_text(text, encoding="utf-8")
    done = subprocess.run([PIN, file], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert re.search("missing", done.stderr)
    assert file.read_text(encoding="utf-8") == text
