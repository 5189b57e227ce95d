"""Without a Java for Spark, a job says what to install."""

from pathlib import Path

import pytest

from halfway.pipeline.engines.spark_session import require_java
from halfway.pipeline.errors import PipelineError


def fake_java(folder: Path, version: str, *, modules: bool = True) -> Path:
    """Create a `java` that prints a version and can lack the module that Spark needs."""
    (folder / "bin").mkdir(parents=True)
    java = folder / "bin" / "java"
    refuse = "" if modules else "echo Error: Module jdk.incubator.vector not found >&2; exit 1\n"
    java.write_text(f"#!/bin/sh\n{refuse}echo 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)
    return java


@pytest.mark.parametrize("version", ["17.0.15", "21.0.1"])
def test_a_full_java_of_the_right_version_is_taken(tmp_path: Path, version: str) -> None:
    """JAVA_HOME is what Spark's launcher looks at first."""
    java = fake_java(tmp_path, version)
    assert require_java({"JAVA_HOME": str(tmp_path), "PATH": ""}) == java


def test_without_java_home_the_path_counts(tmp_path: Path) -> None:
    """As for Spark's launcher."""
    java = fake_java(tmp_path, "17")
    assert require_java({"PATH": str(tmp_path / "bin")}) == java


@pytest.mark.parametrize(
    "version, modules", [("11.0.2", True), ("1.8.0_392", True), ("25.0.1", True), ("17.0.1", False)]
)
def test_a_java_that_spark_refuses_is_named_with_the_remedy(tmp_path: Path, version: str, modules: bool) -> None:
    """Too old, too new, or cut down: what was found, and what to install."""
    fake_java(tmp_path, version, modules=modules)
    found = rf'version "{version}"' if modules else "Module jdk.incubator.vector not found"
    with pytest.raises(PipelineError, match=rf"{found}.*openjdk-17") as refused:
        require_java({"JAVA_HOME": str(tmp_path)})
    assert str(tmp_path) in str(refused.value)


def test_no_java_at_all_is_told_with_the_remedy(tmp_path: Path) -> None:
    """Neither in JAVA_HOME nor on the PATH."""
    with pytest.raises(PipelineError, match=r"no java.*openjdk-17"):
        require_java({"PATH": str(tmp_path)})
    with pytest.raises(PipelineError, match=r"holds no bin/java.*openjdk-17"):
        require_java({"JAVA_HOME": str(tmp_path)})
