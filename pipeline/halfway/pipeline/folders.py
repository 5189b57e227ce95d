"""Small files beside tables, wherever Spark can write: a local folder, HDFS, an object store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from halfway.pipeline.errors import SourceError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Folder:
    """A folder by path or URI, through Hadoop's file systems, as Spark itself reaches it."""

    def __init__(self, spark: SparkSession, uri: str) -> None:
        """Take the folder; nothing is made until something is written."""
        context = spark.sparkContext
        # Untyped: py4j builds its classes while it runs.
        self._jvm: Any = context._jvm  # noqa: SLF001 - the documented way into Spark's JVM from Python
        self._configuration: Any = context._jsc.hadoopConfiguration()  # noqa: SLF001
        self.uri = uri.rstrip("/")

    def path(self, *parts: str) -> str:
        """Return the path or URI of something in it."""
        return "/".join((self.uri, *parts))

    def exists(self, *parts: str) -> bool:
        """Whether it is there."""
        path, system = self._at(*parts)
        return bool(system.exists(path))

    def names(self, *parts: str) -> list[str]:
        """Return what lies in a folder, nothing where there is none."""
        path, system = self._at(*parts)
        if not system.exists(path):
            return []
        return sorted(str(status.getPath().getName()) for status in system.listStatus(path))

    def delete(self, *parts: str) -> None:
        """Remove it with all that is in it; nothing happens where it is not there."""
        path, system = self._at(*parts)
        system.delete(path, True)

    def write(self, text: str, *parts: str) -> None:
        """Write a small file whole, in place of one that is there."""
        path, system = self._at(*parts)
        with_care, _ = self._at(*parts[:-1], f".{parts[-1]}.unfinished")
        stream = system.create(with_care, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        system.delete(path, False)
        system.rename(with_care, path)

    def read(self, *parts: str) -> str:
        """Return a small file's text; SourceError where it is not there."""
        path, system = self._at(*parts)
        if not system.exists(path):
            raise SourceError(f"there is no {self.path(*parts)}")
        stream = system.open(path)
        try:
            return bytes(self._jvm.org.apache.hadoop.io.IOUtils.readFullyToByteArray(stream)).decode()
        finally:
            stream.close()

    def _at(self, *parts: str) -> tuple[Any, Any]:
        path = self._jvm.org.apache.hadoop.fs.Path(self.path(*parts))
        return path, path.getFileSystem(self._configuration)
