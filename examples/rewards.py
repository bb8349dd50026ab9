"""Rewards of one's own, one of each kind. See docs/rewards.md for what they are called with.

rewards:
- {type: python, name: closeness, target: "examples.rewards:closeness"}
- {type: python, name: variety, target: "examples.rewards:variety", batch: true, weight: 0.1}
- {type: python, name: judge, target: "examples.rewards:judge", kwargs: {url: "http://localhost:8001/judge"}}
"""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request


def closeness(response: str, answer: str) -> float:
    """Per sample: 1 for the right number, less the further off the response's last number is."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", response)
    if not numbers:
        return 0.0
    return 1.0 / (1.0 + abs(float(numbers[-1]) - float(answer)))


def variety(prompt_id: list[str], response: list[str]) -> list[float]:
    """A batch: the share of a prompt's other responses that differ from this one."""
    groups: dict[str, list[str]] = {}
    for key, text in zip(prompt_id, response, strict=True):
        groups.setdefault(key, []).append(text)
    return [
        1.0 - (groups[key].count(text) - 1) / max(1, len(groups[key]) - 1)
        for key, text in zip(prompt_id, response, strict=True)
    ]


async def judge(prompt: str, response: str, url: str) -> float:
    """Async: ask a server, which answers {"score": ...}. Many calls are in flight at once."""

    def ask() -> float:
        body = json.dumps({"prompt": prompt, "response": response}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            return float(json.load(reply)["score"])

    return await asyncio.to_thread(ask)
