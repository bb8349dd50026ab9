"""Model and data sources. An absolute path is on this machine; anything else is a hub name.

`load_spec` makes existing paths absolute, relative to the spec's folder. Libraries would prefer a folder of the working
directory over the hub model with the same name, so such a name is refused and only ever requested from the hub.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from rlhfless.spec.base import MOST_TOKENS, HubPath, SpecModel

DType = Literal["float32", "bfloat16", "float16"]


class LoRASpec(SpecModel):
    """Train low-rank adapters (LoRA, arXiv 2106.09685) on a frozen model instead of all its weights.

    A learning rate of about ten times that of full fine-tuning fits (Thinking Machines, LoRA Without Regret, 2025).
    """

    rank: Annotated[int, Field(ge=1, le=512)] = 32
    """Rank of the adapters: a power of two."""

    alpha: Annotated[int, Field(ge=1, le=1024)] = 32
    """Adapters are scaled by alpha / rank: a power of two."""

    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1, max_length=64)] = "all-linear"
    """Linear layers with an adapter: all of the decoder layers, or names such as `q_proj` and patterns such as
    `*_proj`."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the initial values."""

    path: HubPath | None = None
    """Local folder of an adapter in PEFT's format to start from, of this rank, alpha and these targets. The reference
    is then the model with this adapter. `null`: new adapters, which change nothing at first."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of the names of the layers with an adapter."""
        return ("*",) if self.targets == "all-linear" else tuple(self.targets)

    @field_validator("rank", "alpha")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            lower = 1 << (value.bit_length() - 1)
            raise ValueError(f"give a power of two, such as {lower} or {2 * lower}, so that the scale rounds nothing")
        return value


class ModelSpec(SpecModel):
    """The policy to train, in Hugging Face format. For runs of type `reward_model`, the model that the reward model
    starts from."""

    path: HubPath
    """Local folder, or model hub name such as `Qwen/Qwen3-0.6B`."""

    tokenizer: HubPath | None = None
    """Folder or hub name of the tokenizer. `null`: the model's own."""

    dtype: DType = "float32"
    """Number format in which the learner publishes weights and the engine serves them."""

    max_context_tokens: Annotated[int, Field(ge=2, le=MOST_TOKENS)] | None = None
    """Maximum length of prompt + response, in tokens. `null`: the model's own limit."""

    trust_remote_code: bool = False
    """Run code that comes with the model. Use it only for models you trust."""

    lora: LoRASpec | None = None
    """Train adapters instead of all weights. `null`: all weights."""


class HeldOutSpec(SpecModel):
    """Prompts that are never trained on. Give either `path` or `fraction`."""

    path: HubPath | None = None
    """JSONL or Parquet file, or hub data set, with the same columns as the training prompts."""

    split: str = "test"
    """Split of a hub data set."""

    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of the training prompts to hold out, chosen by a hash of the prompt id and the seed."""

    max_prompts: Annotated[int, Field(ge=1)] = 256
    """Maximum number of prompts to evaluate on, from the start of the file."""

    @model_validator(mode="after")
    def _one_source(self) -> HeldOutSpec:
        if (self.path is None) == (self.fraction is None):
            raise ValueError("give exactly one of `path` and `fraction`")
        return self


RESERVED_KWARGS = (
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "tokenizer_kwargs",
)
"""Arguments of transformers' `apply_chat_template` that users cannot set, in addition to `return_...` and
`..._token`."""


def require_template_kwargs(chat_template: bool, kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments without a chat template, and for those that the run itself sets."""
    if kwargs and not chat_template:
        raise ValueError("`chat_template_kwargs` needs `chat_template: true`")
    for name, value in kwargs.items():
        if isinstance(value, str) and value.lower() in ("true", "false"):
            raise ValueError(f"`chat_template_kwargs` has the text {value!r} for {name!r}; write it without quotes")
        if name in RESERVED_KWARGS or name.startswith("return_") or name.endswith("_token"):
            raise ValueError(f"`chat_template_kwargs` has {name!r}, which the run itself gives; leave it out")


SetName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,38}$")]


def require_different(names: Sequence[str]) -> None:
    """Raise ValueError if two sets have the same name."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two sets are called {twice[0]!r}; give one of them another `name`")


class NamedSetSpec(SpecModel):
    """A named set of held-out prompts, with the same columns as the training prompts."""

    name: SetName
    """Short lowercase name, used in metric names."""

    path: Annotated[HubPath, Field(min_length=1)]
    """JSONL or Parquet file, or hub data set."""

    split: str = "test"
    """Split of a hub data set."""

    max_prompts: Annotated[int, Field(ge=1)] = 256
    """Maximum number of prompts to evaluate on, from the start of the file."""


class MixtureSetSpec(SpecModel):
    """A set of training prompts in a mixture."""

    name: SetName
    """Short lowercase name, used in metric names and in `rewards.*.sets`."""

    path: Annotated[HubPath, Field(min_length=1)]
    """JSONL or Parquet file, or hub data set name."""

    split: str = "train"
    """Split of a hub data set; ignored for files."""

    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Relative weight: the set's share of each step's prompts is its weight divided by the sum of all weights."""

    prompt_field: str | None = None
    """Column with the prompt. `null`: as `prompts.prompt_field`."""

    id_field: str | None = None
    """Column with the prompt id. `null`: as `prompts.id_field`."""


class DrawLessSpec(SpecModel):
    """Select prompts less often if their samples all had the same reward, that is, always right or always wrong."""

    factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """After k such visits in a row, a prompt's selection probability is multiplied by factor^k."""

    floor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Lower bound on that multiplier, so that prompts keep returning."""


class DataSpec(SpecModel):
    """Rows with prompts."""

    section: ClassVar[str]
    """The spec key of this section."""

    path: Annotated[HubPath, Field(min_length=1)] | None = None
    """JSONL or Parquet file, or hub data set name."""

    split: str = "train"
    """Split of a hub data set; ignored for files."""

    prompt_field: str = "prompt"
    """Column with the prompt: a string or a list of chat messages."""

    id_field: str | None = None
    """Column with a stable prompt id. `null`: a hash of the prompt."""

    chat_template: bool = False
    """Render the prompt with the tokenizer's chat template."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments for the chat template, such as `{enable_thinking: false}`. The template must use each of
    them."""

    held_out: HeldOutSpec | None = None
    """Prompts for evaluation. `null`: none."""

    shuffle: bool = True
    """Shuffle the prompts in every epoch, based on the run's seed. `false`: keep the order of the file."""

    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """Handling of rows that cannot be read, rendered, learned or scored. `refuse`: refuse the run. `skip`: skip the row
    and report it. Also applies to held-out rows and `evaluation.sets`. If more than 10 % of one source's rows are bad,
    the run is refused in any case."""

    @model_validator(mode="after")
    def _arguments_have_a_template(self) -> DataSpec:
        require_template_kwargs(self.chat_template, self.chat_template_kwargs)
        return self

    @property
    def mixed(self) -> tuple[MixtureSetSpec, ...]:
        """The sets that training prompts are mixed from, in place of `path`."""
        return ()

    @property
    def files(self) -> list[tuple[str, str, str]]:
        """Field, path and split of each source of training prompts."""
        own = [(f"{self.section}.path", self.path, self.split)] if self.path is not None else []
        return [*own, *((f"prompts.mixture.{i}.path", each.path, each.split) for i, each in enumerate(self.mixed))]

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the sets of a mixture, by name."""
        return {each.name: each.weight for each in self.mixed}


class PromptsSpec(DataSpec):
    """Training prompts, from `path` or a `mixture`. All other columns are passed to the rewards."""

    section: ClassVar[str] = "prompts"

    mixture: Annotated[tuple[MixtureSetSpec, ...], Field(max_length=64)] = ()
    """Several sets of prompts to mix, instead of `path`."""

    draw_less: DrawLessSpec | None = None
    """Select prompts less often if their last samples taught nothing. `null`: select all equally often."""

    @model_validator(mode="after")
    def _one_source(self) -> PromptsSpec:
        if (self.path is None) == (not self.mixture):
            raise ValueError("give exactly one of `path` and `mixture`")
        require_different([each.name for each in self.mixture])
        return self

    @property
    def mixed(self) -> tuple[MixtureSetSpec, ...]:
        """See DataSpec."""
        return self.mixture


MOST_SKIPPED = 0.1
"""Largest fraction of one source's rows that `on_bad_row: skip` skips. More bad rows point to a wrong key."""


def skip_hint(spec: DataSpec, bad: int, total: int) -> str:
    """Return the end of a hint about bad rows, or an empty string if they cannot be skipped."""
    if spec.on_bad_row == "skip" or not 0 < bad <= MOST_SKIPPED * total:
        return ""
    return f"; or set {spec.section}.on_bad_row: skip to run without {'this row' if bad == 1 else 'these rows'}"


class WrittenSpec(DataSpec):
    """Rows with prompts and written responses."""

    path: Annotated[HubPath, Field(min_length=1)]
    """JSONL or Parquet file, or hub data set name."""


RELATIVE = "Relative paths count from the spec's folder, and those of --set from the current folder"
"""Hint for a file or folder that is not there."""

NOT_HERE = "name it by its absolute path, or start rlhfless in another folder"
"""Hint for a name that `shadowed` refuses."""


def is_path(name: str) -> bool:
    """Return whether the name is a path on this machine instead of a hub name."""
    return os.path.isabs(name)


def shadowed(name: str) -> str:
    """Return why a name must not be requested from the hub, or an empty string if it may be."""
    if is_path(name) or not os.path.lexists(name):
        return ""
    return f"{name!r} is no absolute path, so it is a name of the hub; but the working directory has it, too"


RunType = Literal["rlhf", "sft", "reward_model", "dpo"]

DATA: Mapping[RunType, str] = {
    "rlhf": "prompts",
    "sft": "demonstrations",
    "reward_model": "preferences",
    "dpo": "preferences",
}
"""The data section of each run type."""


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
