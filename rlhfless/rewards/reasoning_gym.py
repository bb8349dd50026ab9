"""The scorers of reasoning-gym (extra `reasoning-gym`) as a reward, for rows of `rlhfless prompts reasoning-gym`."""

from __future__ import annotations

import ast
import re
from typing import Any

_TAGGED = re.compile(r"<answer>\s?(.*?)\s?</answer>", re.DOTALL)


def score(response: str, entry: str) -> float:
    """Return the score of a response, from 0 to 1: that of its last `<answer>`, or of all of it without such tags.

    `entry`: the column of that name, which the task's scorer reads.
    """
    import reasoning_gym  # takes seconds to import

    task = entry_of(entry)
    answers = _TAGGED.findall(response)
    answer = (answers[-1] if answers else response.rpartition("</think>")[2]).strip()
    return float(reasoning_gym.get_score_answer_fn(task["metadata"]["source_dataset"])(answer, task))


def entry_of(text: str) -> dict[str, Any]:
    """Return an entry as reasoning-gym made it. Raises ValueError.

    It is written as a Python literal, not as JSON: some scorers compare tuples.
    """
    entry: dict[str, Any] = ast.literal_eval(text)
    return entry
