"""Run types other than RLHF, which learn from written responses: their data, settings, and absent keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, Field

from rlhfless.spec.base import SpecModel
from rlhfless.spec.data import WrittenSpec
from rlhfless.spec.errors import Problem
from rlhfless.spec.removed import NAMES

RunType = Literal["rlhf", "sft", "reward_model", "dpo"]


class DemonstrationsSpec(WrittenSpec):
    """Data of runs of type `sft`: prompts with one written response each."""

    section: ClassVar[str] = "demonstrations"

    response_field: str | None = "response"
    """Column with the response: a string, or a list of chat messages that starts and ends with the assistant. `null`:
    `prompt_field` holds a whole conversation that ends with the assistant, which needs `chat_template`."""

    learned_turns: Literal["all", "last"] = "all"
    """For whole conversations (`response_field: null`): learn all assistant messages, or only the last one."""


class PreferencesSpec(WrittenSpec):
    """Data of runs of type `reward_model` and `dpo`: prompts with a chosen and a rejected response each."""

    section: ClassVar[str] = "preferences"

    chosen_field: str = "chosen"
    """Column with the better response: a string, a list of chat messages that starts and ends with the assistant, or a
    whole conversation with the same beginning as the rejected one, which needs no `prompt_field`."""

    rejected_field: str = "rejected"
    """Column with the other response, in the same form."""


class DPOSpec(SpecModel):
    """Direct preference optimization (arXiv 2305.18290)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the policy is held close to the reference. The implicit reward of a response is `beta` times the log
    ratio of policy to reference probability."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed fraction of pairs with swapped labels (conservative DPO, https://ericmitchell.ai/cdpo.pdf)."""


_OF_RLHF = (
    "prompts",
    "rewards",
    "scoring",
    "algorithm",
    "generation",
    "samples_per_prompt",
    "schedule",
    "critic",
    "functions",
    "weights",
    "evaluation.samples_per_prompt",
    "evaluation.pass_at",
    "evaluation.pass_from",
    "evaluation.sets",
    "scaling.policy",
    "scaling.contract",
    "scaling.generation",
    "scaling.prefill",
    "scaling.hold_scoring",
)
_OF_REFERENCE = ("reference", "scaling.hold_reference")

ABSENT: Mapping[RunType, tuple[str, ...]] = {
    "rlhf": ("demonstrations", "preferences", "dpo"),
    "sft": (*_OF_RLHF, *_OF_REFERENCE, "preferences", "dpo"),
    "reward_model": (*_OF_RLHF, *_OF_REFERENCE, "demonstrations", "dpo", "learner.logits_mib", "learner.head_dtype"),
    "dpo": (*_OF_RLHF, "demonstrations"),
}
"""Keys that do not apply to each run type. They are refused if given, and not written to its spec.yaml."""

DATA: Mapping[RunType, str] = {
    "rlhf": "prompts",
    "sft": "demonstrations",
    "reward_model": "preferences",
    "dpo": "preferences",
}
"""The data section of each run type."""


def name_elsewhere(key: str, values: Any) -> str | None:
    """Return the dotted spec key for another tool's setting `key`, given the spec's values."""
    name = NAMES.get(key)
    run_type = cast(RunType, values.get("type", "rlhf") if isinstance(values, Mapping) else "rlhf")
    if name is None or run_type not in DATA:
        return name
    if name.startswith("prompts."):
        return name.replace("prompts", DATA[run_type], 1)
    return None if any(f"{name}.".startswith(f"{absent}.") for absent in ABSENT[run_type]) else name


def absent_key_problems(spec: BaseModel, run_type: RunType) -> Iterator[Problem]:
    """Yield a problem for each given key that the run type does not have."""
    for key in ABSENT[run_type]:
        if _is_given(spec, key.split(".")):
            what = f"a run of type {run_type} has no such key"
            yield Problem(key, what, f"leave it out; docs/supervised.md has the keys of each type, and {_types(key)}")


def _types(key: str) -> str:
    having = [name for name, keys in ABSENT.items() if key not in keys]
    return f"it is of {' and '.join(having)}"


def _is_given(model: Any, path: list[str]) -> bool:
    name, *below = path
    return name in model.model_fields_set and (not below or _is_given(getattr(model, name), below))


def without_absent(values: dict[str, Any], run_type: RunType) -> dict[str, Any]:
    """Return a dumped spec without the keys that its type does not have."""
    left = dict(values)
    for key in ABSENT[run_type]:
        section, _, below = key.partition(".")
        if below and section in left:
            left[section] = {name: value for name, value in left[section].items() if name != below}
        elif not below:
            left.pop(section, None)
    return left
