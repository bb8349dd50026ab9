"""The environment of a run: what answers the model between its turns (docs/environments.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from rlhfless.spec.base import Duration, FilePath, Processes, SpecModel, Tokens, without_user
from rlhfless.spec.explain import nearest
from rlhfless.spec.imports import IMPORT_PATH

PROCESS, MCP, GYMNASIUM, OPENENV = "process", "mcp", "gymnasium", "openenv"
"""Types that are not user code: a program that is a client of OpenAI's or Anthropic's API, MCP tool servers, games of
gymnasium, and OpenEnv servers."""

_KEYS = {"command": PROCESS, "folder": PROCESS, "servers": MCP, "id": GYMNASIUM, "options": GYMNASIUM,
         "actions": GYMNASIUM, "url": OPENENV}  # fmt: skip
"""Keys that belong to one type."""

_NEEDED = {
    PROCESS: ("command", "[python, agent.py]"),
    MCP: ("servers", "[{command: python, args: [tools.py]}]"),
    GYMNASIUM: ("id", "FrozenLake-v1"),
    OPENENV: ("url", "http://host:8000"),
}
"""By type: the key that it needs, and an example."""


class McpServerSpec(SpecModel):
    """An MCP server that each episode starts, and talks to over its standard input and output."""

    command: Annotated[str, Field(min_length=1)]
    """Program. `python` is the run's own interpreter."""

    args: Annotated[tuple[str, ...], Field(max_length=1024)] = ()
    """Its arguments."""

    env: Mapping[str, str] = Field(default_factory=dict)
    """Further environment variables. They are recorded with the spec, so put no secret here."""

    cwd: FilePath | None = None
    """Folder in which it starts. A relative path counts from the spec's folder."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The server as rlhfless.environments.mcp takes it."""
        return self.model_dump(exclude_defaults=True)


class EnvironmentSpec(SpecModel):
    """An environment that answers the model's turns: it runs tools, or plays a game. A sample is then an episode of
    several turns. See docs/environments.md."""

    type: str
    """Your environment: import path of a class or an async function, `package.module:Class`. `process`: a program that
    is a client of OpenAI's or Anthropic's API. `mcp`: the tools of MCP servers. `gymnasium`: a game of gymnasium's
    registry. `openenv`: that of an OpenEnv server."""

    command: Annotated[tuple[str, ...], Field(max_length=1024)] = ()
    """Program and arguments, for type `process`. `{column}` in an argument is replaced by a column of the row. `python`
    is the run's own interpreter."""

    folder: FilePath | None = None
    """Folder in which the program starts, for type `process`. `null`: a new, empty folder per episode."""

    servers: Annotated[tuple[McpServerSpec | str, ...], Field(max_length=64)] = ()
    """Servers for type `mcp`: each a program, or a URL."""

    id: str = ""
    """Name of the game in gymnasium's registry, for type `gymnasium`: `FrozenLake-v1`, or `module:Name` to import the
    module first."""

    options: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the game, for type `gymnasium`."""

    actions: Annotated[tuple[str, ...], Field(max_length=1024)] = ()
    """Names of the game's actions 0, 1, ..., for type `gymnasium`. Without names, the model writes the numbers."""

    url: str = ""
    """Address of the server, for type `openenv`, such as `http://host:8000`."""

    turns: Annotated[int, Field(ge=1, le=10_000)] = 16
    """Maximum turns of the model in an episode."""

    turn_tokens: Tokens = 1024
    """Maximum tokens of one turn. `generation.max_tokens` limits the tokens of the whole episode after the prompt,
    including those of the environment."""

    result_tokens: Tokens = 4096
    """Maximum tokens of one answer of the environment. The middle of a longer one is cut out."""

    call_s: Duration = 30.0
    """Time limit of one call, in seconds. A longer call is a failure of the environment."""

    park_s: Duration = 5.0
    """Wait for an answer after which an episode leaves its actor. It is given to an actor again when the answer is
    there, and an actor whose episodes all wait can be released."""

    episode_s: Duration = 600.0
    """Time limit of an episode, in seconds, from its start on an actor. It then ends with the reward so far."""

    invalid_calls: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Turns in a row with an invalid tool call that end an episode. It is scored."""

    retries: Annotated[int, Field(ge=0, le=100)] = 2
    """Failures of the environment after which an episode resumes or restarts. After more, it has no reward, and
    `scoring.on_failure` decides about the sample."""

    replicas: Processes = 1
    """Replicas of the environment. Each has its own `sessions`, `cores` and, where a cluster has room, node."""

    sessions: Processes = 32
    """Episodes that a replica plays at the same time, each in a worker process of its own. Further episodes wait."""

    cores: Processes = 1
    """CPU cores of a replica in a run on GPUs. On CPU cores, it shares those of the run."""

    memory_mib: Annotated[int, Field(ge=64, le=1 << 24)] = 1024
    """Memory that a session may add to that of its process."""

    @field_validator("type")
    @classmethod
    def _looks_like_a_path(cls, target: str) -> str:
        if target not in _NEEDED and not IMPORT_PATH.fullmatch(target):
            raise ValueError(
                f"{nearest(target, _NEEDED)}write {', '.join(f'`{kind}`' for kind in _NEEDED)}, or "
                "`package.module:Class`, such as `my_env:Guess` for my_env.py"
            )
        return target

    @field_validator("servers")
    @classmethod
    def _are_urls(cls, servers: tuple[McpServerSpec | str, ...]) -> tuple[McpServerSpec | str, ...]:
        for server in servers:
            if isinstance(server, str):
                if not server.startswith(("http://", "https://")):
                    raise ValueError(f"{server!r} is no URL; write `https://...`, or {{command: ..., args: [...]}}")
                without_user(server, "a server that needs a token needs a class of your own (docs/environments.md)")
        return servers

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        if url:
            if not url.startswith(("http://", "https://", "ws://", "wss://")):
                raise ValueError(f"{url!r} is no URL; write `http://host:port` or `ws://host:port`")
            without_user(url, "a server that needs a token needs a class of your own (docs/environments.md)")
        return url

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> EnvironmentSpec:
        if self.type in _NEEDED:
            key, example = _NEEDED[self.type]
            if not getattr(self, key):
                raise ValueError(
                    f"`{key}` is missing, and type {self.type} needs it; write, for example, {key}: {example}"
                )
        for key, kind in _KEYS.items():
            if getattr(self, key) and self.type != kind:
                raise ValueError(f"`{key}` belongs to type {kind}, and the type is {self.type!r}; remove one of them")
        return self
