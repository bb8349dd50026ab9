"""What every part of a spec has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class SpecModel(BaseModel):
    """A frozen part of a `RunSpec`.

    Unknown keys are refused: a key that silently does nothing is the fault users fear most. Defaults live
    here and nowhere else. Each field's docstring is its help text, in the JSON schema and in editors.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        # `model:` is a key users expect; pydantic reserves the prefix `model_` for its own methods only.
        protected_namespaces=(),
    )
