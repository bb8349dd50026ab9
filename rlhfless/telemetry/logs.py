"""Logging of a run's driver: everything to run.log, warnings to the terminal, the run ID on every line.

Modules log with `logging.getLogger(__name__)`. Our loggers write messages from INFO, library loggers from WARNING.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from pathlib import Path

from rlhfless.util.text import legible, redacted_text

LOG_FILE = "run.log"

_FILE_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)s {run_id} %(name)s: %(message)s"
_DATE_FORMAT = "%Y-%m-%dT%H:%M:%S"
_TERMINAL_FORMAT = "%(levelname)s %(name)s: %(message)s"


class RunLog:
    """Handlers on the root logger, active until `close`.

    Opens `folder`/run.log for appending; a resumed run continues in the same file.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LOG_FILE
        to_file = logging.FileHandler(self.path, encoding="utf-8")
        utc = _Legible(_FILE_FORMAT.format(run_id=run_id.replace("%", "%%")), _DATE_FORMAT)
        utc.converter = time.gmtime
        to_file.setFormatter(utc)
        to_terminal = _StderrHandler(logging.WARNING)
        to_terminal.setFormatter(_Legible(_TERMINAL_FORMAT))
        self._handlers: tuple[logging.Handler, ...] = (to_file, to_terminal)
        for handler in self._handlers:
            logging.getLogger().addHandler(handler)
        self._ours = logging.getLogger("rlhfless")
        self._level_before = self._ours.level
        self._ours.setLevel(logging.INFO)
        logging.captureWarnings(True)

    def close(self) -> None:
        logging.captureWarnings(False)
        self._ours.setLevel(self._level_before)
        for handler in self._handlers:
            logging.getLogger().removeHandler(handler)
            with suppress(OSError):  # the disk is full; the run reports that itself
                handler.close()


class _Legible(logging.Formatter):
    """Escapes messages and redacts secrets, because messages may quote any text of rewards, libraries and replicas."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted_text(legible(super().format(record)))


class _StderrHandler(logging.Handler):
    """Writes to the current sys.stderr, which a live display replaces while it draws."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:
            self.handleError(record)
