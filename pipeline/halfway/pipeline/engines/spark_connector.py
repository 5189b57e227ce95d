"""Spark's packages for Kafka, Avro and Delta: jgo resolves them by name, and Spark gets their jars.

`spark.jars.packages` would use Ivy, which fails if the local Maven repository has the description of an artifact
without its jar.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path
from typing import Final

from halfway.pipeline.errors import ConnectorError

VERSIONS: Final = {"4.0": "4.0.0", "4.1": "4.1.1", "4.2": "4.2.0"}
"""For each PySpark the newest version of the packages that can be resolved. It works with every patch of it."""
_DELTA: Final = {
    "4.0": "io.delta:delta-spark_2.13:4.0.1",
    "4.1": "io.delta:delta-spark_4.1_2.13:4.1.0",
    "4.2": "io.delta:delta-spark_4.2_2.13:4.4.0",
}
"""For each PySpark the package for Delta tables, which has versions of its own."""
_ARTIFACTS: Final = ("org.apache.spark:spark-sql-kafka-0-10_2.13", "org.apache.spark:spark-avro_2.13")
_JAR: Final = re.compile(r"(?P<name>.+?)-(?P<version>\d[\w.+-]*)\.jar\Z")


def packages(version: str | None = None) -> tuple[str, ...]:
    """Return the coordinates of the packages, by default those for the PySpark that is installed."""
    version = version or _default()
    return *(f"{artifact}:{version}" for artifact in _ARTIFACTS), _DELTA.get(version[:3], _DELTA["4.0"])


def jars(version: str | None = None) -> tuple[Path, ...]:
    """Return the jars of the packages, without those that PySpark has. They are downloaded once, then cached.

    Raises:
        ConnectorError: they cannot be resolved. The message has the cause and how to give them manually.

    """
    version = version or _default()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halfway"
    written_down = folder / f"spark-and-delta-{version}.json"
    found = _read(written_down)
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "connector.lock").open("a") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            found = _read(written_down) or _resolve(version)
            written_down.write_text(json.dumps([str(jar) for jar in found]), encoding="utf-8")
    brought = _brought_by_pyspark()
    return tuple(jar for jar in found if _name(jar) not in brought)


def _default() -> str:
    """Return the version for the PySpark that is installed; one without an entry has packages of its own number."""
    import pyspark

    return VERSIONS.get(".".join(pyspark.__version__.split(".")[:2]), pyspark.__version__)


def _resolve(version: str) -> tuple[Path, ...]:
    known = ", ".join(f"{works} for PySpark {of}" for of, works in VERSIONS.items())
    remedy = f"give the jars with --jars, or another version with --connector-version ({known})"
    try:
        import jgo
    except ImportError:
        raise ConnectorError(f"jgo is missing: pip install '.[pipeline]' in a checkout, or {remedy}") from None
    try:
        return tuple({jar.name: jar for each in packages(version) for jar in jgo.build(each).all_jars}.values())
    # jgo has no exceptions of its own. Every error of its parts means that the jars are missing.
    except Exception as error:
        raise ConnectorError(f"{', '.join(packages(version))} could not be resolved ({error}): {remedy}") from error


def _read(written_down: Path) -> tuple[Path, ...]:
    """Return the jars of an earlier resolution, none if one of them is gone."""
    try:
        jars = tuple(map(Path, json.loads(written_down.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError):
        return ()
    return jars if all(jar.is_file() for jar in jars) else ()


def _brought_by_pyspark() -> frozenset[str]:
    import pyspark

    return frozenset(_name(jar) for jar in (Path(pyspark.__file__).parent / "jars").glob("*.jar"))


def _name(jar: Path) -> str:
    match = _JAR.match(jar.name)
    return match["name"] if match else jar.name
