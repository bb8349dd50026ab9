"""Base class of all parts of a spec."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhfless.spec.errors import Problem
from rlhfless.spec.explain import models, several
from rlhfless.util.text import user_in

MOST_PROCESSES = 4096
"""Maximum replicas, ranks, devices or workers of one function. The driver keeps an object and a connection for each."""

MOST_TOKENS = 1 << 24
"""Maximum tokens of a sequence or a batch: 16 times the longest model context."""

MOST_STEPS = 10_000_000

MOST_S = 1e8
"""Three years. Python timers and locks raise OverflowError for much longer times."""

Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Duration = Annotated[float, Field(gt=0, le=MOST_S)]
"""Seconds."""

Ranks = Processes | Literal["auto"]
"""Processes that share a model; the memory plan decides `auto`."""


def count_of(ranks: Ranks) -> int:
    """Return `ranks` as a number; 1 until `auto` is decided."""
    return 1 if ranks == "auto" else ranks


def without_user(url: str, hint: str) -> str:
    """Return the URL. Raises ValueError with the hint if it contains a user or password, because URLs are shown and
    logged."""
    if user_in(url):
        raise ValueError(f"a user or a password in a URL would show in logs and traces; {hint}")
    return url


class StrictModel(BaseModel):
    """Refuses `true` for a number and 1 for `true`, which pydantic would convert silently."""

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_not_booleans(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        problems = [
            Problem(".".join((name, *place)), f"{each!r}: {what}")
            for name, field in cls.model_fields.items()
            if name in values
            for wrong, what in _refused(frozenset(_scalars(field.annotation)))
            for place, each in _leaves(values[name])
            if type(each) in wrong
        ]
        if problems:
            raise several(problems)
        return values


def _refused(allowed: frozenset[type]) -> Iterator[tuple[tuple[type, ...], str]]:
    """Yield the value types a field refuses, given the types it allows, with a message for each."""
    if bool in allowed and not allowed & {int, float, object}:
        yield (int, float), "should be true or false"
    elif allowed & {int, float} and not allowed & {bool, object}:
        yield (bool,), "should be a number, not true or false"


def _scalars(annotation: Any) -> Iterator[type]:
    """Yield the plain types an annotation allows; `object` if it allows any, or contains models, which check their own
    values."""
    if isinstance(annotation, type) and annotation in (bool, int, float):
        yield annotation
    elif (
        annotation is Any
        or annotation is object
        or (isinstance(annotation, type) and issubclass(annotation, BaseModel))
    ):
        yield object
    elif get_origin(annotation) is Literal:
        yield from (type(value) for value in get_args(annotation) if isinstance(value, bool | int))
    elif get_origin(annotation) is Annotated:
        yield from _scalars(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType, tuple, list, set, frozenset):
        for part in get_args(annotation):
            yield from _scalars(part)
    elif get_origin(annotation) in (dict, Mapping):
        yield from _scalars(get_args(annotation)[1])


def _leaves(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the plain values in a value, each with the keys that lead to it."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, each in items:
        yield from _leaves(each, (*place, str(key)))
    if not isinstance(value, Mapping | list | tuple):
        yield place, value


class SpecModel(StrictModel):
    """A frozen part of a `RunSpec`.

    Unknown keys are refused, because a key without effect would be hard to find. All defaults live here. Each field's
    docstring is its help text in the JSON schema and in editors.
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


@dataclass(frozen=True, slots=True)
class Location:
    """Marks a field whose value names a file or folder."""

    kind: Literal["hub", "file", "kept"]
    """`hub`: read, and may be a hub name instead. `file`: read. `kept`: written by the run; a relative path counts from
    the current folder, not from the spec's."""
    words: frozenset[str] = frozenset()
    """Values that are not paths."""


HubPath = Annotated[str, Location("hub")]
"""A file or folder, or a hub name."""

FilePath = Annotated[str, Location("file")]
KeptPath = Annotated[str, Location("kept")]
"""A folder or URL that the run writes to."""


@cache
def locations(model: type[BaseModel]) -> Mapping[str, Location]:
    """Return the marked fields of a model and its sections, as dotted keys with `*` for list items."""
    return dict(_marked(model, ""))


def _marked(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, Location]]:
    for name, field in model.model_fields.items():
        for part in (field.annotation, *field.metadata):
            yield from ((f"{prefix}{name}", mark) for mark in _marks(part))
        starred = "*." if get_origin(field.annotation) in (tuple, list) else ""
        for section in models(field.annotation):
            yield from _marked(section, f"{prefix}{name}.{starred}")


def _marks(annotation: Any) -> Iterator[Location]:
    """Yield the marks in an annotation or its metadata, through optionals and unions."""
    if isinstance(annotation, Location):
        yield annotation
    for part in get_args(annotation):
        yield from _marks(part)


SAMPLE_BYTES = 2048
"""Maximum driver memory per sample before generation: its item, table entries, and part of the request to an actor."""

ROW_BYTES = 4096
"""Maximum memory per data row, in addition to its content."""

DATA_FACTOR = 64
"""Maximum memory per byte of data. A token takes up to 44 bytes; an empty list in JSON takes 22 per character."""


class SizesSpec(SpecModel):
    """Limits on the size of a run. They catch a number with an extra digit before it fills the driver's memory. Raise a
    limit for a larger run. A service may have lower limits, which a spec cannot raise."""

    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 100_000
    """Maximum `steps`. The driver keeps about 2 KiB of metrics per step."""

    step_samples: Annotated[int, Field(ge=1, le=1 << 20)] = 1 << 16
    """Maximum samples per step (`prompts_per_step` x `samples_per_prompt`). Each takes 2 KiB in the driver before
    generation."""

    held_out_samples: Annotated[int, Field(ge=1, le=1 << 20)] = 1 << 16
    """Maximum samples per evaluation (`prompts.held_out.max_prompts` x `evaluation.samples_per_prompt`)."""

    step_tokens: Annotated[int, Field(ge=1, le=1 << 32)] = 1 << 28
    """Maximum response tokens per step or evaluation (samples x `generation.max_tokens`). Each takes about 40 bytes in
    the driver once generated."""

    prompts: Annotated[int, Field(ge=1, le=10_000_000)] = 1_000_000
    """Maximum rows per data set. Each takes 4 KiB plus its content."""

    data_mib: Annotated[int, Field(ge=1, le=1 << 16)] = 256
    """Maximum size of each data set in MiB, as JSONL or uncompressed. A byte takes 5 to 15 bytes in memory, at most
    64."""

    def at_most(self, bounds: SizesSpec) -> SizesSpec:
        """Return the lower of both limits for each key."""
        return SizesSpec(**{name: min(value, getattr(bounds, name)) for name, value in self})


MOST_SIZES = SizesSpec.model_construct(
    **{name: field.metadata[-1].le for name, field in SizesSpec.model_fields.items()}
)
"""The largest limits a spec may set."""


@dataclass(frozen=True, slots=True)
class Size:
    """One size in a spec, and the key that limits it."""

    bound: str
    """Key of SizesSpec."""
    where: str
    """The field to lower."""
    figure: int
    text: str
    """How the figure is computed."""


def size_problems(sizes: Iterable[Size], bounds: SizesSpec, owner: str = "") -> list[Problem]:
    """Return a problem for each size above the limits. `owner` is who set them; by default, the spec itself."""
    return [
        Problem(size.where, *too_large(size.text, size.figure, size.bound, bounds, owner))
        for size in sizes
        if size.figure > getattr(bounds, size.bound)
    ]


def too_large(text: str, figure: int, bound: str, bounds: SizesSpec, owner: str = "") -> tuple[str, str]:
    """Return the problem and the hint for a size above a limit."""
    most, ceiling = getattr(bounds, bound), getattr(MOST_SIZES, bound)
    made = f"{text} is {figure:,}" if not text.endswith(str(figure)) else text
    if owner:
        return f"{made}, and {owner} allows at most {most:,}", "ask for less"
    raised = f", or raise sizes.{bound}" if figure <= ceiling else ""
    return f"{made}, above sizes.{bound} ({most:,})", f"ask for less{raised}; it can be {ceiling:,} at most"


def driver_bytes(samples: int, bounds: SizesSpec) -> int:
    """Return the maximum driver memory in bytes before the first sample: for `samples` of a step or evaluation, and for
    the largest training and evaluation data that the limits allow."""
    data = bounds.prompts * ROW_BYTES + bounds.data_mib * DATA_FACTOR * 2**20
    return samples * SAMPLE_BYTES + 2 * data
