"""The broker's log, and the excerpt that errors show."""

import re
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
