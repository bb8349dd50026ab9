"""Teachers: frozen models that the policy learns from by their logprobs of its own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field, model_validator

from rlhfless.spec.base import Duration, Location, Processes, Ranks, SpecModel, without_user
from rlhfless.spec.data import ModelSpec

SELF = "self"
"""`path` of a teacher that is the run's own model, as it was before training."""

MOST_TEACHERS = 16

MAY_DIFFER_OF_A_TEACHER = ("ranks", "url", "token_env", "concurrency", "timeout_s")
"""Keys that a resumed run may change: they do not change what a teacher computes, but by rounding."""

FUNCTION_PREFIX = "teacher_"
"""Prefix of the functions and the per-token outputs of teachers."""


class TeacherSpec(SpecModel):
    """A frozen model with the policy's vocabulary, for `algorithm.distill`. It computes the logprob of each generated
    token, in a function of its own that holds devices only while it works, with the learner's compute settings. See
    docs/distillation.md."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,30}$")]
    """Name in metrics, plans and traces; the function is called `teacher_<name>`. Names must be unique."""

    path: Annotated[str, Location("hub", words=frozenset({SELF})), Field(min_length=1)] | None = None
    """Folder or hub name of the teacher in Hugging Face format. `self`: the run's own model before training, or with
    LoRA its frozen base, which is useful with `prompt_field`. Give either this or `url`."""

    url: Annotated[str, Field(pattern=r"^https?://[^/?#]+$")] | None = None
    """Address of a vLLM server, such as `http://teacher:8000`, which is asked for `prompt_logprobs` of token ids. Needs
    `generation.temperature: 1`, because the server cannot rescale logits. Must not contain a user or password."""

    token_env: str | None = None
    """Environment variable of the teacher's function that holds the bearer token for `url`. `null`: no token."""

    concurrency: Processes = 16
    """Maximum concurrent requests to `url`."""

    timeout_s: Duration = 300.0
    """Timeout of one request to `url` in seconds, with all its retries."""

    sets: Annotated[tuple[str, ...], Field(min_length=1, max_length=64)] | None = None
    """Names of the sets in `prompts.mixture` whose prompts have this teacher. `null`: all prompts."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of this teacher's part of the advantage."""

    prompt_field: str | None = None
    """Column with the prompt that the teacher reads instead of the policy's, such as one that includes the solution. It
    is rendered like the policy's prompt. `null`: the policy's prompt."""

    ranks: Ranks = "auto"
    """Ranks (processes) that share the teacher and the batch, on the learner's devices. `auto`: as `reference.ranks`.
    """

    trust_remote_code: bool = False
    """Run code that comes with the model."""

    @model_validator(mode="after")
    def _one_source(self) -> TeacherSpec:
        if (self.path is None) == (self.url is None):
            what = "neither path nor url" if self.path is None else "both path and url"
            raise ValueError(f"teacher {self.name!r} has {what}; give one of them")
        if self.url is not None:
            without_user(self.url, "send a token instead: name its environment variable as `token_env`")
        return self

    @property
    def function(self) -> str:
        """The name of its function."""
        return f"{FUNCTION_PREFIX}{self.name}"

    @property
    def is_self(self) -> bool:
        """Whether it is the run's own model before training."""
        return self.path == SELF

    def model_of(self, policy: ModelSpec) -> ModelSpec:
        """Return the model to load. Its tokens are the policy's, so it needs no tokenizer."""
        if self.is_self or self.path is None:
            return policy
        return ModelSpec(path=self.path, dtype=policy.dtype, trust_remote_code=self.trust_remote_code)

    def teaches(self, source: str) -> bool:
        """Return whether the prompts of a set have this teacher."""
        return self.sets is None or source in self.sets


def teacher_problems(
    teachers: Sequence[TeacherSpec], sets: Sequence[str], temperature: float, call_s: float
) -> Iterator[str]:
    """Yield what is wrong with teachers together with the rest of a run, each with a hint."""
    names = [each.name for each in teachers]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"two teachers are called {name!r}; give one of them another `name`"
    for index, each in enumerate(teachers):
        for unknown in sorted({*(each.sets or ())} - {*sets}):
            known = ", ".join(sorted(sets)) or "none: prompts.mixture is not given"
            yield f"teachers.{index}.sets has {unknown!r}, which no training set is called (they are {known})"
        if each.url is not None and temperature != 1:
            yield (
                f"teachers.{index}.url needs generation.temperature 1, and it is {temperature:g}: a server gives "
                "logprobs at temperature 1; set it to 1, or give the teacher as `path`"
            )
        if each.url is not None and each.timeout_s >= call_s:
            yield (
                f"teachers.{index}.timeout_s ({each.timeout_s:g}) must be below timeouts.call_s ({call_s:g}), which "
                "would end the wait for the server without its cause"
            )
