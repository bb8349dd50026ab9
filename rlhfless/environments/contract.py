"""The contract of an environment: one class, or one async function, in the user's own file.

A class has `reset(seed, row)`. Its other public methods are the tools: type hints and docstring make the JSON schema
that the model reads. Optional: `observe(text)` answers a turn without a tool call, `done()`, `reward()`, `snapshot()`
and `restore(state)`, `close()`, and `replayable = True`. All may be async. `tools()` and `call(name, arguments)` are in
place of methods where the tools are not known before (rlhfless.environments.mcp).

A function `async play(task, model)` has its own loop of turns.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.errors import PydanticUserError

from rlhfless.spec import EnvironmentSpec
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import shown

OWN_METHODS = ("reset", "observe", "done", "reward", "snapshot", "restore", "close", "tools", "call")
"""Public methods that are not tools."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_EXAMPLE = "see the example at the top of docs/environments.md"


class ToolError(Exception):
    """A tool refuses a call; the model reads the message, and the episode goes on."""


class EpisodeOver(Exception):
    """Raised by `model.turn` in the user's own loop, at a limit of the episode."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer to a turn, with its own reward."""

    text: str
    reward: float = 0.0


class InvalidCall(Exception):
    """The model's call does not fit any tool; the message is for the model."""


@dataclass(frozen=True)
class Tool:
    """A method that the model can call."""

    name: str
    description: str
    arguments: type[BaseModel]

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The function as OpenAI's API and chat templates describe it."""
        parameters = _without_titles(self.arguments.model_json_schema())
        parameters.pop("additionalProperties", None)
        parameters.setdefault("properties", {})
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def checked(self, given: Any) -> dict[str, Any]:
        """Return the arguments as the method takes them. Raises InvalidCall."""
        if not isinstance(given, Mapping):
            raise InvalidCall(f"the arguments of `{self.name}` must be a JSON object, got {shown(given)}")
        try:
            values = self.arguments.model_validate(dict(given))
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
            raise InvalidCall(f"wrong arguments for `{self.name}`: {'; '.join(faults)}") from error
        return {name: getattr(values, name) for name in values.model_fields_set}


@dataclass(frozen=True, slots=True)
class Description:
    """An environment as other processes know it: plain data."""

    name: str
    digest: str
    """Of its source file."""
    plays: bool
    """Whether it is a function with its own loop."""
    tools: tuple[Mapping[str, Any], ...]
    """Schemas of the methods; tools of `tools()` follow with each reset."""
    observes: bool
    ends: bool
    """Whether it has `done()`."""
    snapshots: bool
    replayable: bool
    offers: bool = False
    """Whether it has `tools()`."""


@dataclass(frozen=True, slots=True)
class EnvironmentSource:
    """Where an environment comes from."""

    target: str
    """`module:Class`, `path.py:Class`, `path.py`, `process`, `mcp`, `gymnasium` or `openenv`."""
    command: tuple[str, ...] = ()
    """Of a `process`."""
    folder: str | None = None
    """Of a `process`."""
    servers: tuple[Mapping[str, Any] | str, ...] = ()
    """Of `mcp`."""
    game: str = ""
    """Of `gymnasium`: its id."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `gymnasium`."""
    actions: tuple[str, ...] = ()
    """Of `gymnasium`."""
    url: str = ""
    """Of `openenv`."""

    @classmethod
    def of(cls, spec: EnvironmentSpec) -> EnvironmentSource:
        """Return the source that a spec names."""
        servers = (each if isinstance(each, str) else each.parameters for each in spec.servers)
        game = (spec.id, spec.options, spec.actions, spec.url)
        return cls(spec.type, spec.command, spec.folder, tuple(servers), *game)


@dataclass(frozen=True)
class Environment:
    """A user's environment, loaded and checked."""

    target: str
    code: Any
    """The class or function."""
    tools: Mapping[str, Tool] = field(default_factory=dict)

    def has(self, method: str) -> bool:
        return callable(getattr(self.code, method, None))

    @property
    def description(self) -> Description:
        plays = not inspect.isclass(self.code)
        return Description(
            name=self.target,
            digest=_digest(self.code),
            plays=plays,
            tools=tuple(tool.schema for tool in self.tools.values()),
            observes=self.has("observe"),
            ends=self.has("done"),
            snapshots=self.has("snapshot"),
            replayable=bool(getattr(self.code, "replayable", False)),
            offers=self.has("tools"),
        )


def checked(target: str, code: Any) -> Environment:
    """Return a class or function as an environment. Raises InputError with all that breaks the contract."""
    tools, problems = _checked_function(code) if inspect.isfunction(code) else _checked_class(code)
    if problems:
        raise InputError(f"environment {target!r}", problems)
    return Environment(target, code, tools)


def _digest(code: Any) -> str:
    try:
        text = Path(inspect.getfile(code)).read_bytes()
    except (OSError, TypeError):
        text = repr(code).encode()
    return hashlib.sha256(text).hexdigest()[:16]


# -- checks of the contract


def _checked_function(function: Callable[..., Any]) -> tuple[dict[str, Tool], list[Problem]]:
    names = [*inspect.signature(function).parameters]
    if inspect.iscoroutinefunction(function) and names[:2] == ["task", "model"]:
        return {}, []
    what = f"is `{'async ' * inspect.iscoroutinefunction(function)}def {function.__name__}({', '.join(names)})`"
    return {}, [Problem(function.__name__, what, "an episode with its own loop is `async def play(task, model)`")]


def _checked_class(code: type) -> tuple[dict[str, Tool], list[Problem]]:
    problems = list(_method_problems(code))
    for name in dir(code):
        member = inspect.getattr_static(code, name, None)
        if isinstance(member, staticmethod | classmethod) and not name.startswith("_") and name not in OWN_METHODS:
            what = f"is a {type(member).__name__}, and tools are methods of an episode's object"
            problems.append(Problem(name, what, f"give it `self`; or call it `_{name}` if it is not a tool"))
    tools: dict[str, Tool] = {}
    for name, method in inspect.getmembers(code, inspect.isfunction):
        is_method = inspect.isfunction(inspect.getattr_static(code, name))
        if is_method and not name.startswith("_") and name not in OWN_METHODS:
            faults = list(_tool_problems(name, method))
            problems += faults
            if not faults:
                try:
                    tools[name] = Tool(name, inspect.getdoc(method) or "", _arguments(name, method))
                    _ = tools[name].schema
                except Exception as error:  # pydantic raises several kinds of error for types without a schema
                    what = f"its arguments have no JSON schema: {str(error).splitlines()[0]}"
                    problems.append(
                        Problem(name, what, "use str, int, float, bool, list, dict, Literal or a dataclass")
                    )
    if not (tools or problems or callable(getattr(code, "observe", None)) or callable(getattr(code, "call", None))):
        what = "there is neither a tool nor `observe`, so the model could do nothing"
        problems.append(Problem("", what, "add a public method with type hints and a docstring, or `observe(text)`"))
    return tools, problems


def _method_problems(code: type) -> Iterator[Problem]:
    """Report methods of the contract that are missing or have other parameters."""
    required = [
        each
        for each in [*inspect.signature(code).parameters.values()]
        if each.default is each.empty and each.kind in _NAMED
    ]
    if required:
        what = f"requires `{required[0].name}`"
        yield Problem("__init__", what, "give it a default: environments are created without arguments")
    if not callable(getattr(code, "reset", None)):
        yield Problem("reset", "is missing", f"write `def reset(self, seed: int, row: dict) -> str`; {_EXAMPLE}")
    parameters = {"reset": ("seed", "row"), "observe": ("text",), "restore": ("state",), "call": ("name", "arguments")}
    for name in OWN_METHODS:
        method = inspect.getattr_static(code, name, None)
        if method is None:
            continue
        wanted = ("self", *parameters.get(name, ()))
        if not inspect.isfunction(method):
            yield Problem(name, f"is a {type(method).__name__}", f"make it a method: `def {name}({', '.join(wanted)})`")
        elif tuple(inspect.signature(method).parameters) != wanted:
            got = f"has the parameters ({', '.join(inspect.signature(method).parameters)})"
            yield Problem(name, got, f"write `def {name}({', '.join(wanted)})`")
    for one, other in (("snapshot", "restore"), ("restore", "snapshot"), ("tools", "call"), ("call", "tools")):
        if hasattr(code, one) and not hasattr(code, other):
            yield Problem(other, f"is missing, and there is `{one}`", f"add it, or remove `{one}`")
    if not isinstance(getattr(code, "replayable", False), bool):
        yield Problem("replayable", f"is {shown(getattr(code, 'replayable', None))}", "write True or False")


def _tool_problems(name: str, method: Callable[..., Any]) -> Iterator[Problem]:
    """Report what keeps a public method from being a tool."""
    hide = f"; or call it `_{name}` if it is not a tool"
    if not inspect.getdoc(method):
        yield Problem(name, "has no docstring", f"say in one what it does: the model reads it{hide}")
    try:
        hints = get_type_hints(method, include_extras=True)
    except Exception as error:  # a hint is any expression
        yield Problem(name, f"has a type hint that cannot be read: {error}", "import the names that it uses")
        return
    for parameter in [*inspect.signature(method).parameters.values()][1:]:
        where = f"{name}.{parameter.name}"
        if parameter.kind not in _NAMED:
            yield Problem(where, "cannot be filled by name", f"name each argument{hide}")
        elif parameter.name not in hints:
            yield Problem(where, "has no type hint", f"write `{parameter.name}: int`, for instance{hide}")


def _arguments(name: str, method: Callable[..., Any]) -> type[BaseModel]:
    hints = get_type_hints(method, include_extras=True)
    fields: dict[str, Any] = {
        each.name: (hints[each.name], ... if each.default is each.empty else each.default)
        for each in [*inspect.signature(method).parameters.values()][1:]
    }
    if reserved := [field for field in fields if field.startswith("_") or hasattr(BaseModel, field)]:
        raise PydanticUserError(f"`{reserved[0]}` cannot be an argument's name", code=None)
    return create_model(name, __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)


def _without_titles(schema: Any) -> Any:
    """Drop the titles that pydantic derives from names: they cost tokens and say nothing. An argument may have the name
    `title`."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _without_titles(value) for key, value in schema.items() if key != "title" or isinstance(value, dict)}
