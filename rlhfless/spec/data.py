"""Where the model and the data come from: an absolute path is on this machine, and all else a name of the hub.

`load_spec` makes what is there, counted from the spec's folder, absolute. Libraries take what the working directory has
under a name of the hub; so such a name is refused, and is only ever asked of the hub.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from rlhfless.spec.base import MOST_TOKENS, HubPath, SpecModel

DType = Literal["float32", "bfloat16", "float16"]


class ModelSpec(SpecModel):
    """The policy that is trained, in Hugging Face format; for a reward model, the policy that it starts from."""

    path: HubPath
    """A local folder, or a model hub name such as `Qwen/Qwen3-0.6B`."""

    tokenizer: HubPath | None = None
    """Folder or hub name of the tokenizer; by default the model's own."""

    dtype: DType = "float32"
    """Number format in which the learner publishes the weights and the engine serves them."""

    max_context_tokens: Annotated[int, Field(ge=2, le=MOST_TOKENS)] | None = None
    """Longest prompt + response; by default the model's own limit."""

    trust_remote_code: bool = False
    """Run code that comes with the model. Only for models you trust."""


class HeldOutSpec(SpecModel):
    """Prompts that are never trained on. Give `path`, or `fraction` of the training prompts."""

    path: HubPath | None = None
    """JSONL or Parquet file, or hub data set, with the same fields as the training prompts."""

    split: str = "test"
    """Split of a hub data set."""

    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the training prompts that is set aside, chosen by the hash of the prompt id and the seed."""

    max_prompts: Annotated[int, Field(ge=1)] = 256
    """Evaluate on at most this many prompts, the first in the file."""

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
"""Arguments of transformers' `apply_chat_template` that are not the user's to give; nor is `return_...` or
`..._token`."""


def require_template_kwargs(chat_template: bool, kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments without a chat template, and for those that the run gives itself."""
    if kwargs and not chat_template:
        raise ValueError("`chat_template_kwargs` needs `chat_template: true`")
    for name, value in kwargs.items():
        if isinstance(value, str) and value.lower() in ("true", "false"):
            raise ValueError(f"`chat_template_kwargs` has the text {value!r} for {name!r}; write it without quotes")
        if name in RESERVED_KWARGS or name.startswith("return_") or name.endswith("_token"):
            raise ValueError(f"`chat_template_kwargs` has {name!r}, which the run itself gives; leave it out")


SetName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,38}$")]


def require_different(names: Sequence[str]) -> None:
    """Raises ValueError if two sets have the same name."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two sets are called {twice[0]!r}; give one of them another `name`")


class NamedSetSpec(SpecModel):
    """A named set of held-out prompts, with the same fields as the training prompts."""

    name: SetName
    """Short name, in lower case; part of the names of its figures."""

    path: Annotated[HubPath, Field(min_length=1)]
    """JSONL or Parquet file, or hub data set."""

    split: str = "test"
    """Split of a hub data set."""

    max_prompts: Annotated[int, Field(ge=1)] = 256
    """Evaluate on at most this many prompts, the first in the file."""


class MixtureSetSpec(SpecModel):
    """A set of training prompts that are mixed with others."""

    name: SetName
    """Short name, in lower case: of the rewards that are for it alone (`rewards.*.sets`), and in figures."""

    path: Annotated[HubPath, Field(min_length=1)]
    """A JSONL or Parquet file, or a hub data set name."""

    split: str = "train"
    """Split of a hub data set; ignored for files."""

    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Each step has as large a share of its prompts from this set as this is of all weights."""

    prompt_field: str | None = None
    """As `prompts.prompt_field`, which counts if this is left out."""

    id_field: str | None = None
    """As `prompts.id_field`, which counts if this is left out."""


class DrawLessSpec(SpecModel):
    """Prompts whose samples had all the same reward, always right or always wrong, are drawn less often."""

    factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A prompt that was so k times in a row is drawn with factor^k of its chance."""

    floor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """It keeps at least this share of its chance, so that it comes back."""


class DataSpec(SpecModel):
    """Rows with prompts."""

    section: ClassVar[str]
    """The key of this section."""

    path: Annotated[HubPath, Field(min_length=1)] | None = None
    """A JSONL or Parquet file, or a hub data set name."""

    split: str = "train"
    """Split of a hub data set; ignored for files."""

    prompt_field: str = "prompt"
    """Field with the prompt: a string, or a list of chat messages."""

    id_field: str | None = None
    """Field with a stable prompt id; by default the hash of the prompt."""

    chat_template: bool = False
    """Render the prompt with the tokenizer's chat template."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template, such as `{enable_thinking: false}`; each must be read by it."""

    held_out: HeldOutSpec | None = None
    """Prompts for evaluation."""

    shuffle: bool = True
    """A new order for every epoch, drawn from the run's seed."""

    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """Of a row that cannot be read, rendered, learned or scored: refuse the run, or skip the row and say so. Also of
    held-out rows and `evaluation.sets`. With more than 10 % such rows in one source the run is refused."""

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
    """The training prompts: those of `path`, or a `mixture`. All other columns are passed to the rewards."""

    section: ClassVar[str] = "prompts"

    mixture: Annotated[tuple[MixtureSetSpec, ...], Field(max_length=64)] = ()
    """Several sets, in place of `path`."""

    draw_less: DrawLessSpec | None = None
    """Draw prompts less often from which the last samples taught nothing; by default all as often."""

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
"""Largest share of the rows of one source that `on_bad_row: skip` skips. More point to a wrong key, not to bad rows."""


def skip_hint(spec: DataSpec, bad: int, total: int) -> str:
    """The end of a hint about faulty rows; empty where they cannot be skipped."""
    if spec.on_bad_row == "skip" or not 0 < bad <= MOST_SKIPPED * total:
        return ""
    return f"; or set {spec.section}.on_bad_row: skip to run without {'this row' if bad == 1 else 'these rows'}"


class WrittenSpec(DataSpec):
    """Rows with prompts and written responses."""

    path: Annotated[HubPath, Field(min_length=1)]
    """A JSONL or Parquet file, or a hub data set name."""


NOT_HERE = "name it by its absolute path, or start rlhfless in another folder"
"""The hint for a name that `shadowed` refuses."""


def is_path(name: str) -> bool:
    """Whether the name is a path of this machine, and not a name of the hub."""
    return os.path.isabs(name)


def shadowed(name: str) -> str:
    """Why a name must not be asked of the hub; empty if it may be."""
    if is_path(name) or not os.path.lexists(name):
        return ""
    return f"{name!r} is no absolute path, so it is a name of the hub; but the working directory has it, too"
