"""The environment of a run: what answers the model between its turns (docs/environments.md)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from rlhfless.spec.base import Duration, Processes, SpecModel, Tokens
from rlhfless.spec.imports import IMPORT_PATH


class EnvironmentSpec(SpecModel):
    """An environment that answers the model's turns: it runs tools, or plays a game. A sample is then an episode of
    several turns. See docs/environments.md."""

    type: str
    """Your environment: import path of a class or an async function, `package.module:Class`."""

    turns: Annotated[int, Field(ge=1, le=10_000)] = 16
    """Maximum turns of the model in an episode."""

    turn_tokens: Tokens = 1024
    """Maximum tokens of one turn. `generation.max_tokens` limits the tokens of the whole episode after the prompt,
    including those of the environment."""

    result_tokens: Tokens = 4096
    """Maximum tokens of one answer of the environment. The middle of a longer one is cut out."""

    call_s: Duration = 30.0
    """Time limit of one call, in seconds. A longer call is a failure of the environment."""

    episode_s: Duration = 600.0
    """Time limit of an episode, in seconds, from its start on an actor. It then ends with the reward so far."""

    invalid_calls: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Turns in a row with an invalid tool call that end an episode. It is scored."""

    retries: Annotated[int, Field(ge=0, le=100)] = 2
    """Failures of the environment after which an episode resumes or restarts. After more, it has no reward, and
    `scoring.on_failure` decides about the sample."""

    sessions: Processes = 32
    """Episodes that are played at the same time, each in a worker process of its own. Further episodes wait."""

    cores: Processes = 1
    """CPU cores of the environment in a run on GPUs. On CPU cores, it shares those of the run."""

    memory_mib: Annotated[int, Field(ge=64, le=1 << 24)] = 1024
    """Memory that a session may add to that of its process."""

    @field_validator("type")
    @classmethod
    def _looks_like_a_path(cls, target: str) -> str:
        if not IMPORT_PATH.fullmatch(target):
            raise ValueError("write it as `package.module:Class`, such as `my_env:Guess` for my_env.py")
        return target
