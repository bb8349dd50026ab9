"""Games of gymnasium's registry as environments of text: the model's turn names the action (extra `gymnasium`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rlhfless.environments.contract import ToolError, Turn
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import shown

_COLOUR, _RESET = re.compile(r"\x1b\[[1-9][0-9;]*m"), re.compile(r"\x1b\[0?m")


class GymnasiumGame:
    """Base of an environment with the game `id`. Override `reset` to explain it, and `_text_of` to describe what the
    model sees."""

    id: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    """Keyword arguments of `gymnasium.make`."""
    actions: ClassVar[Sequence[str]] = ()
    """Names of the actions 0, 1, ... of a discrete space."""
    replayable = True

    def reset(self, seed: int, row: dict[str, Any]) -> str:  # noqa: ARG002
        self._game, self._over = made(self.id, self.options), False
        observation, _ = self._game.reset(seed=seed)
        return f"{self._asks()}\n{self._text_of(observation)}"

    def observe(self, text: str) -> Turn:
        """Take the action that a turn names: the last one in it."""
        observation, reward, ended, cut, _ = self._game.step(self._action(text))
        self._over = bool(ended or cut)
        return Turn(self._text_of(observation), float(reward))

    def done(self) -> bool:
        return self._over

    def close(self) -> None:
        self._game.close()

    def _text_of(self, observation: Any) -> str:
        """Return the game's own picture in text, if it has one, with what it colours in brackets; else the
        observation."""
        if self._game.render_mode == "ansi":
            return _RESET.sub("]", _COLOUR.sub("[", str(self._game.render()))).strip()
        if isinstance(observation, str):
            return observation
        return json.dumps(observation, default=lambda value: value.tolist())

    def _asks(self) -> str:
        space = self._game.action_space
        if self.actions:
            return f"Answer with an action: {', '.join(self.actions)}."
        return "" if _is_text(space) else f"Answer with an action, a number from {space.start} to {_last(space)}."

    def _action(self, text: str) -> Any:
        """Raises ToolError, which the model reads."""
        space = self._game.action_space
        if _is_text(space):
            action: Any = text.strip()
        elif self.actions:
            names = "|".join(map(re.escape, sorted(self.actions, key=len, reverse=True)))
            found = re.findall(rf"(?<!\w)({names})(?!\w)", text, re.IGNORECASE)
            lower = [name.lower() for name in self.actions]
            action = space.start + lower.index(found[-1].lower()) if found else None
        else:
            numbers = re.findall(r"-?\d+", text)
            action = int(numbers[-1]) if numbers else None
        if action is None or not space.contains(action):
            raise ToolError(f"there is no such action. {self._asks()}".strip())
        return action


def made(name: str, options: Mapping[str, Any]) -> Any:
    """Return a game, which draws itself as text if it can."""
    import gymnasium

    game = gymnasium.make(name, **options)
    if "ansi" not in game.metadata.get("render_modes", ()) or "render_mode" in options:
        return game
    game.close()
    return gymnasium.make(name, render_mode="ansi", **options)


def gymnasium_game(name: str, given: Mapping[str, Any], names: Sequence[str]) -> type[GymnasiumGame]:
    """Return an environment with a game of the registry. Raises InputError."""
    problems = []
    try:
        space = made(name, given).action_space
        if _is_text(space) and names:
            problems.append(
                Problem("actions", f"is {shown(list(names))}, and the game's actions are texts", "remove it")
            )
        elif not _is_text(space) and not hasattr(space, "n"):
            what = f"has the actions {space}, which are neither discrete nor texts"
            problems.append(Problem("id", what, "derive a class that reads them (docs/environments.md)"))
        elif names and len(names) != space.n:
            problems.append(Problem("actions", f"has {len(names)} names, and the game has {space.n} actions"))
    except ImportError as error:
        problems.append(Problem("type", str(error), "pip install 'rlhfless[gymnasium]', or the game's own package"))
    except Exception as error:  # of gymnasium, or of the game
        problems.append(Problem("id", f"is {shown(name)}, which cannot be made: {error}", "see gymnasium.registry"))
    if problems:
        raise InputError("environment 'gymnasium'", problems)

    class Game(GymnasiumGame):
        id, options, actions = name, given, tuple(names)

    return Game


def _is_text(space: Any) -> bool:
    return type(space).__name__ == "Text"


def _last(space: Any) -> int:
    return int(space.start + space.n - 1)
