"""Small files beside tables, in any folder that Spark can write to: local, HDFS, an object store."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, TYPE_CHECKING, Any

from halfway.pipeline.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


def is_local(path: str) -> bool:
    """Return whether a path or URI is of this machine."""
    scheme, sign, _ = path.partition("://")
    return not sign or scheme == "file"


class LocalFolder:
    """A folder of this machine, without a JVM."""

    def __init__(self, path: str) -> None:
        """Take a folder, as a path or a URI with `file:`. Nothing is created before something is written."""
        self.uri = str(Path(path.removeprefix("file://").removeprefix("file:")))

    def path(self, *parts: str) -> str:
        """Return the path of something in the folder."""
        return str(Path(self.uri, *parts))

    def names(self, *parts: str) -> list[str]:
        """Return the names of what is in a folder."""
        folder = Path(self.uri, *parts)
        return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []

    def write(self, text: str, *parts: str) -> None:
        """Write a small file."""
        with self.writing(*parts) as file:
            file.write(text)

    @contextmanager
    def writing(self, *parts: str) -> Iterator[IO[str]]:
        """Write a file, or replace it, piece by piece."""
        there = Path(self.uri, *parts)
        there.parent.mkdir(parents=True, exist_ok=True)
        with there.open("w", encoding="utf-8", newline="") as file:
            yield file

    def read(self, *parts: str) -> str:
        """Return the text of a small file."""
        there = Path(self.uri, *parts)
        if not there.is_file():
            raise SourceError(f"there is no {there}")
        return there.read_text(encoding="utf-8")


class Folder:
    """A folder by path or URI, through Hadoop's file systems, as for Spark itself."""

    def __init__(self, spark: SparkSession, uri: str) -> None:
        """Take a folder. Nothing is created before something is written."""
        context = spark.sparkContext
        # No types: py4j creates its classes while it runs.
        jvm: Any = context._jvm  # noqa: SLF001 - the documented way into Spark's JVM from Python
        self._jvm = jvm
        # For each part of a name py4j asks the JVM, which searches all its jars.
        self._make_path = jvm.org.apache.hadoop.fs.Path
        self._configuration: Any = context._jsc.hadoopConfiguration()  # noqa: SLF001
        self.uri = uri.rstrip("/")
        path, system = self._at()
        if not path.isAbsolute():
            # In SQL Delta takes the name of a relative path for that of a table in a catalog.
            self.uri = str(system.makeQualified(path).toString())

    def path(self, *parts: str) -> str:
        """Return the path or URI of something in the folder."""
        return "/".join((self.uri, *parts))

    def names(self, *parts: str) -> list[str]:
        """Return the names of what is in a folder; none if it does not exist."""
        path, system = self._at(*parts)
        if not system.exists(path):
            return []
        # The log of a table has thousands of files: a few calls for each of them would take seconds.
        paths = self._jvm.org.apache.hadoop.fs.FileUtil.stat2Paths(system.listStatus(path))
        told = str(self._jvm.org.apache.commons.lang3.ArrayUtils.toString(paths))
        folder = f"{system.makeQualified(path).toString().rstrip('/')}/"
        return sorted(filter(None, told[1:-1].removeprefix(folder).split(f",{folder}")))

    def write(self, text: str, *parts: str) -> None:
        """Write a small file, or replace it."""
        with self.writing(*parts) as file:
            file.write(text)

    @contextmanager
    def writing(self, *parts: str) -> Iterator[IO[str]]:
        """Write a file, or replace it. Every call into the JVM is expensive: the file is written here, then copied."""
        path, system = self._at(*parts)
        if system.exists(path) and system.getFileStatus(path).isDirectory():
            raise SourceError(f"{path} cannot be written: it is a folder")
        with NamedTemporaryFile("w", encoding="utf-8", newline="") as file:
            yield file.file
            file.flush()
            system.copyFromLocalFile(False, True, self._make_path(Path(file.name).as_uri()), path)

    def read(self, *parts: str) -> str:
        """Return the text of a small file; SourceError if it does not exist."""
        path, system = self._at(*parts)
        if not system.exists(path):
            raise SourceError(f"there is no {self.path(*parts)}")
        stream = system.open(path)
        try:
            return bytes(self._jvm.org.apache.hadoop.io.IOUtils.readFullyToByteArray(stream)).decode()
        finally:
            stream.close()

    def _at(self, *parts: str) -> tuple[Any, Any]:
        path = self._make_path(self.path(*parts))
        return path, path.getFileSystem(self._configuration)


Files = Folder | LocalFolder
"""A folder, as an engine opens it."""
