"""Load an environment: a class or function of the user's, a program, the tools of MCP servers, a game of gymnasium,
or one of an OpenEnv server."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhfless.environments.contract import Environment, EnvironmentSource, checked
from rlhfless.spec import GYMNASIUM, MCP, OPENENV, PROCESS
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import nearest, shown
from rlhfless.spec.imports import TargetError, cause, load_target

PLAY = "play"
"""Name of a function with its own loop, in a file that is named without it."""


def load(source: EnvironmentSource) -> Environment:
    """Load an environment. Raises InputError with all that breaks the contract."""
    if source.target == PROCESS:
        from rlhfless.environments.agent_program import agent_program  # starlette takes time to import

        return Environment(source.target, agent_program(source.command, source.folder))
    if source.target == MCP:
        from rlhfless.environments.mcp import tools_of_servers

        return checked(source.target, tools_of_servers(source.servers))
    if source.target == GYMNASIUM:
        from rlhfless.environments.gymnasium_game import gymnasium_game

        return checked(source.target, gymnasium_game(source.game, source.options, source.actions))
    if source.target == OPENENV:
        from rlhfless.environments.openenv_game import openenv_game

        return checked(source.target, openenv_game(source.url))
    return checked(source.target, _code(source.target))


def _code(target: str) -> Any:
    """Return the class or function that a target names. Raises InputError."""
    path, _, name = target.partition(":")
    if path.endswith(".py"):
        module = _module_of_file(target, Path(path))
        code = getattr(module, name, None) if name else _only_environment(target, module)
        if code is None:
            hint = (
                nearest(name, _candidates(module)) + f"Environments there: {', '.join(_candidates(module)) or 'none'}"
            )
            raise _refused(target, name, f"there is no `{name}` in {path}", hint)
    elif name:
        try:
            code = load_target(target)
        except TargetError as error:
            raise _refused(target, "", error.what, error.hint) from error
    else:
        raise _refused(target, "", f"got {shown(target)}", "write `module:Class`, `path.py:Class` or `path.py`")
    if not inspect.isclass(code) and not inspect.isfunction(code):
        raise _refused(target, name, f"is a {type(code).__name__}", "name a class, or an async function `play`")
    return code


def _module_of_file(target: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise _refused(target, "", f"no such file: {str(path)!r}", "relative paths count from the current folder")
    folder = str(path.parent.absolute())
    if folder not in sys.path:
        sys.path.append(folder)
    name = "environment_" + re.sub(r"\W", "_", path.stem)  # a file `queue.py` must not become the module `queue`
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None, "its suffix is .py"
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # type hints of its classes are looked up there
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's module may raise any error while it is imported
        raise _refused(target, "", f"importing {str(path)!r} failed: {cause(error)}", "") from error
    return module


def _candidates(module: ModuleType) -> list[str]:
    """Return the names of a module's own environments."""
    own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    classes = [name for name, value in own.items() if inspect.isclass(value) and hasattr(value, "reset")]
    return classes + ([PLAY] if inspect.isfunction(own.get(PLAY)) else [])


def _only_environment(target: str, module: ModuleType) -> Any:
    names = _candidates(module)
    if len(names) != 1:
        found = f"it has {len(names)}: {', '.join(names)}" if names else "it has no class with `reset(seed, row)`"
        raise _refused(target, "", found, f"name one, as in `{target}:{(names or ['Guess'])[0]}`")
    return getattr(module, names[0])


def _refused(target: str, where: str, what: str, hint: str) -> InputError:
    return InputError(f"environment {target!r}", [Problem(where, what, hint)])
