"""The broker's log, of which an error shows the part that matters."""

import re
from pathlib import Path

_TROUBLE = re.compile(r"^\S+ (ERROR|FATAL) |^Exception in thread|^Error |^Error:|^#.*fatal error|^Caused by: ")
_AFTER_TROUBLE = 12
_LAST = 12
_READ_BYTES = 1024 * 1024


class BrokerLog:
    """A log file that several starts append to; mark() at each, and the rest speaks of what came after."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0

    def mark(self) -> None:
        """Take what is there now for past."""
        self._start = self.path.stat().st_size if self.path.exists() else 0

    def text(self) -> str:
        """Give what was written since the mark, of more than 1 MiB the end."""
        try:
            with self.path.open("rb") as log:
                size = log.seek(0, 2)
                log.seek(max(self._start, size - _READ_BYTES))
                return log.read().decode(errors="replace")
        except OSError as error:
            return f"(not readable: {error})"

    def excerpt(self) -> str:
        """Give the first lines that tell of trouble, and the last lines."""
        lines = self.text().splitlines()
        trouble = next((at for at, line in enumerate(lines) if _TROUBLE.search(line)), len(lines))
        last = max(0, len(lines) - _LAST)
        if trouble < last:
            shown = [*lines[trouble : min(trouble + _AFTER_TROUBLE, last)], "...", *lines[last:]]
        else:
            shown = lines[last:]
        return "\n".join(shown) or "(empty)"
