"""Spark's Kafka connector: jgo resolves it by name, and Spark gets its jars.

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

DEFAULT_VERSION: Final = "4.0.0"
"""The newest version that can be resolved. It works with every PySpark 4.0."""
_ARTIFACT: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13"
_JAR: Final = re.compile(r"(?P<name>.+?)-(?P<version>\d[\w.+-]*)\.jar\Z")


def coordinate(version: str) -> str:
    """Return the coordinate for `spark-submit --packages`."""
    return f"{_ARTIFACT}:{version}"


def jars(version: str = DEFAULT_VERSION) -> tuple[Path, ...]:
    """Return the jars of the connector, without those that PySpark has. They are downloaded once, then cached.

    Raises:
        ConnectorError: they cannot be resolved. The message has the cause and how to give them manually.

    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halfway"
    written_down = folder / f"spark-kafka-{version}.json"
    found = _read(written_down)
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "connector.lock").open("a") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            found = _read(written_down) or _resolve(version)
            written_down.write_text(json.dumps([str(jar) for jar in found]), encoding="utf-8")
    brought = _brought_by_pyspark()
    return tuple(jar for jar in found if _name(jar) not in brought)


def _resolve(version: str) -> tuple[Path, ...]:
    remedy = f"give the jars with --jars, or another version with --connector-version ({DEFAULT_VERSION} works)"
    try:
        import jgo
    except ImportError:
        raise ConnectorError(f"jgo is missing: pip install '.[pipeline]' in a checkout, or {remedy}") from None
    try:
        return tuple(jgo.build(coordinate(version)).all_jars)
    # jgo has no exceptions of its own. Every error of its parts means that the jars are missing.
    except Exception as error:
        raise ConnectorError(f"{coordinate(version)} could not be resolved ({error}): {remedy}") from error


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
