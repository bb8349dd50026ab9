"""The base class of all parts of a spec."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class SpecModel(BaseModel):
    """A frozen part of a `RunSpec`.

    Unknown keys are refused: a key that silently does nothing would be hard to find. Defaults live
    here and nowhere else. Each field's docstring is its help text, in the JSON schema and in editors.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        # Users expect a key `model`; pydantic needs the prefix `model_` only for its own methods.
        protected_namespaces=(),
    )
