"""Errors of weight versions, in a separate module so that code that catches them need not import torch."""

from __future__ import annotations

from typing import Literal

from rlhfless.records import WeightVersion

Check = Literal["consumed", "read_back", "moved", "probe", "rollouts"]


class WeightFileError(Exception):
    """A weight file is missing, truncated or damaged. The message names the file and its digest."""


class WeightCheckFailed(Exception):
    """A load is not the expected version. `check` names the failed check (see `weights.check`)."""

    def __init__(self, check: Check, version: WeightVersion, message: str) -> None:
        super().__init__(f"weight check `{check}` failed for {version.label}: {message}")
        self.check = check
        self.version = version
        self.message = message

    def __reduce__(self) -> tuple[type[WeightCheckFailed], tuple[Check, WeightVersion, str]]:
        # Exceptions are pickled by their `args`; this one crosses process boundaries.
        return (WeightCheckFailed, (self.check, self.version, self.message))
