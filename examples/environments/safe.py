"""A safe with a code of three digits, which a model can look up before it opens it (`make demo-agent`)."""


class Safe:
    replayable = True  # the same row and turns give the same answers

    def reset(self, seed: int, row: dict) -> None:
        self.code, self.right = row["code"], 0

    def observe(self, text: str) -> str | None:
        match text.split():
            case ["look", place] if place in ("1", "2", "3"):
                return f"shows {self._digit(int(place))} :"
            case ["open", *digits]:
                self.right = sum(a == b for a, b in zip(digits, self.code, strict=False))
        return None  # the episode ends

    def reward(self) -> float:
        return self.right / len(self.code)

    def _digit(self, place: int) -> str:
        return self.code[place - 1]


class Blind(Safe):
    """The same safe, but nothing can be seen: to check that success comes from looking."""

    def _digit(self, place: int) -> str:
        return "?"
