"""A stream that survives the loss of its reader (`| head`, a closed terminal)."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any, TextIO

log = logging.getLogger(__name__)


class LastingStream:
    """Writes to a stream until a write fails, then discards output. Logs the failure once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.closed_by_reader = False

    def write(self, text: str) -> int:
        if not self.closed_by_reader:
            try:
                return self._stream.write(text)
            except (OSError, ValueError) as error:
                self._leave(error)
        return len(text)

    def flush(self) -> None:
        if not self.closed_by_reader:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._leave(error)

    def _leave(self, error: Exception) -> None:
        self.closed_by_reader = True
        log.info("the output is closed (%s); from here on progress is only logged", error)
        with suppress(OSError, ValueError):  # the interpreter flushes buffered output again at exit
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
