"""Spark's Kafka connector: resolved by name through jgo, given to Spark as jars.

`spark.jars.packages` would do it through Ivy, which takes a description without its jar in the local Maven repository
for the artifact and then fails.
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
"""The newest that can be resolved; it works with every PySpark 4.0."""
_ARTIFACT: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13"
_JAR: Final = re.compile(r"(?P<name>.+?)-(?P<version>\d[\w.+-]*)\.jar\Z")


def coordinate(version: str) -> str:
    """Return what `spark-submit --packages` takes."""
    return f"{_ARTIFACT}:{version}"


def jars(version: str = DEFAULT_VERSION) -> tuple[Path, ...]:
    """Return the connector's jars and what it needs beyond PySpark's own; fetched once, then from the cache.

    Raises:
        ConnectorError: they cannot be had; says why and how to give them by hand.

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
    # jgo has no exceptions of its own: whatever its parts raise means that the jars are not there.
    except Exception as error:
        raise ConnectorError(f"{coordinate(version)} could not be resolved ({error}): {remedy}") from error


def _read(written_down: Path) -> tuple[Path, ...]:
    """Return the jars written down, nothing where one of them is gone."""
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
