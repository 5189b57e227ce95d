"""Where the real database servers cannot run, the tests say what to install."""

import platform
import shutil

import pytest

from tests.support.databases.servers import demand_platform


def test_a_missing_program_or_another_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(RuntimeError, match="setpriv is missing: install the package util-linux"):
        demand_platform()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(RuntimeError, match="not aarch64"):
        demand_platform()
