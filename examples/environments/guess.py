"""Guess a number: a game in a few lines, whose method is the tool.

rlhfless environments test examples/environments/guess.py
"""

import random


class Guess:
    replayable = True  # the same seed and calls give the same answers

    def reset(self, seed: int, row: dict) -> str:
        self.secret, self.left, self.found = random.Random(seed).randrange(100), 8, False
        return "I think of a number from 0 to 99. You have 8 guesses."

    def guess(self, number: int) -> str:
        """Guess the number. The answer is higher, lower or right."""
        self.left, self.found = self.left - 1, number == self.secret
        return "right" if self.found else "higher" if number < self.secret else "lower"

    def done(self) -> bool:
        return self.found or self.left == 0

    def reward(self) -> float:
        return float(self.found)
