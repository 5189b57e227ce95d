"""Folders of the embedded broker that cannot be made or written to are named with the remedy."""

from pathlib import Path

import pytest

from halfway.embedded import EmbeddedConfig, EmbeddedKafka, FolderUnusableError, resolve_jars


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.touch()
    return path


def test_a_cache_that_cannot_be_made(file: Path) -> None:
    """Below a file, and where a file stands in its place."""
    for cache in (file, file / "cache"):
        with pytest.raises(FolderUnusableError, match="XDG_CACHE_HOME") as refused:
            resolve_jars(cache_dir=cache)
        assert str(cache) in str(refused.value)


def test_no_home_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's user has none."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(FolderUnusableError, match="XDG_CACHE_HOME"):
        resolve_jars()


def test_a_data_directory_that_cannot_be_made(file: Path) -> None:
    with pytest.raises(FolderUnusableError, match="data-dir"):
        EmbeddedKafka(EmbeddedConfig(data_dir=file / "data")).start()
