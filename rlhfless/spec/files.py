"""Files of values that the user names beside the spec: a price book, a table of devices, a fitted latency."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from rlhfless.spec import document
from rlhfless.spec.base import SpecModel
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import explain

M = TypeVar("M", bound=SpecModel)


def read_values(path: str | os.PathLike[str], model: type[M], hint: str) -> M:
    """The values of a YAML or JSON file. `hint` is for a file that cannot be read.

    Raises InputError with all problems: file, line, field, value, and the hint.
    """
    try:
        parsed = document.parse(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), [Problem("", f"cannot be read: {error}", hint)]) from error
    except document.DocumentError as error:
        raise InputError(str(path), [error.problem]) from error
    try:
        return model.model_validate(parsed.data)
    except ValidationError as error:
        raise InputError(str(path), explain(error, model, parsed.origins)) from error
