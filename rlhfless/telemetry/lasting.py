"""A stream whose reader may leave (`| head`, a closed terminal) without an end of the program that writes to it."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any, TextIO

log = logging.getLogger(__name__)


class LastingStream:
    """Writes to a stream until that fails, and then to nothing; logs the failure once."""

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
        with suppress(OSError, ValueError):  # what is buffered is flushed again at the end of the interpreter
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
