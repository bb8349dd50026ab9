"""A game of three turns, which notes each of its calls in a file."""

from __future__ import annotations

import os
import random
import time
from typing import Any


class Game:
    """Answers with numbers. The reward depends on what the model says."""

    replayable = True

    def reset(self, seed: int, row: dict[str, Any]) -> str:
        self.key, self.turns, self.said = f"{row['id']}/{seed}", 0, 0
        self.random = random.Random(seed)
        return f"{self.random.randrange(10)} :"

    def observe(self, text: str) -> str | None:
        self.turns += 1
        self.said += len(text.split()) % 7
        with open(os.environ["RLHFLESS_REWARD_LOG"], "a") as log:
            log.write(f"{self.key}/{self.turns}\n")
        time.sleep(0.05)
        return None if self.turns == 3 else f"{self.random.randrange(10)} :"

    def reward(self) -> float:
        return float(self.said)
