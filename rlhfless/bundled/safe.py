"""The bundled task for agents: open a safe by its three digits, which the policy can look up one by one.

    prompt        safe :
    turn          look 1              the environment answers: shows 7 :
    turn          look 2              shows 0 :
    turn          look 3              shows 4 :
    turn          open 7 0 4          the end; the reward is the share of right digits

Most demonstrations open the safe before they have looked at all digits, and guess the others. The policy that imitates
them can look and copy, but its most likely first turn is a guess. Reinforcement learning teaches it to use its tool.
The environment is examples/environments/safe.py.

Codes that are held out are never demonstrated or trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhfless.bundled.task import Demonstration

PROMPT = "safe :"
DIGITS = 3
CODES = 10**DIGITS
_SPLIT_SEED = 7


@dataclass(frozen=True)
class SafeRecipe:
    look_share: float = 0.4
    """Share of turns that look at the next digit, while there is one; the others open the safe."""
    held_out_share: float = 0.2
    train_prompts: int = 320
    held_out_prompts: int = 64

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """See BundledTask."""
        return ("safe", "look", "open", "shows", ":", "?", *map(str, range(10)))

    def problems(self, rng: np.random.Generator, count: int, *, held_out: bool) -> list[SafeProblem]:
        """See BundledTask."""
        return [SafeProblem(int(number)) for number in rng.choice(self._codes(held_out=held_out), count, replace=False)]

    def demonstrations(self, rng: np.random.Generator, count: int) -> list[Demonstration]:
        """See BundledTask."""
        codes = self._codes(held_out=False)
        return [self._demonstration(SafeProblem(int(rng.choice(codes))).code, rng) for _ in range(count)]

    def _demonstration(self, code: str, rng: np.random.Generator) -> Demonstration:
        said, seen = list[str](), 0
        while seen < DIGITS and rng.random() < self.look_share:
            said.append(f"look {seen + 1}")
            seen += 1
        guessed = [str(rng.integers(10)) for _ in range(DIGITS - seen)]
        said.append(f"open {' '.join([*code[:seen], *guessed])}")
        answers = [f"shows {digit} :" for digit in code[:seen]]
        return Demonstration(PROMPT, said[0], tuple(zip(answers, said[1:], strict=True)))

    def _codes(self, *, held_out: bool) -> np.ndarray:
        """Return the numbers of one side of the split."""
        order = np.random.default_rng(_SPLIT_SEED).permutation(CODES)
        first = round(self.held_out_share * CODES)
        return order[:first] if held_out else order[first:]


@dataclass(frozen=True)
class SafeProblem:
    number: int

    @property
    def code(self) -> str:
        return f"{self.number:0{DIGITS}}"

    @property
    def row(self) -> Mapping[str, Any]:
        """See BundledProblem."""
        return {"id": self.code, "prompt": PROMPT, "code": self.code}
