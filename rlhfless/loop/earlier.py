"""The responses to each prompt that the run has drawn, whichever actor drew them: drafts for the next ones.

An engine that drafts suffixes gets those of a prompt with the first request of it. They change no sample, so they may
be lost: after a restart they are those of the journal, and of the trace where that has tokens
(`logging.record_tokens`). Of each prompt the newest are kept, so that older weights fade, and of all prompts those that
were drawn last, up to a number of tokens.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from rlhfless.records import IntArray, Rollout
from rlhfless.records.traces import newest_responses

MOST_RESPONSES = 16
"""Of a prompt. More find hardly more, and travel with each request."""

MOST_TOKENS = 1 << 24
"""Of all prompts: 64 MiB."""


class EarlierResponses:
    """Responses by prompt id. Prompts of several data sets may share an id: then drafts are wrong, and not samples."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._of: OrderedDict[str, deque[IntArray]] = OrderedDict()
        self._tokens = 0

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Take note of responses that have ended."""
        for rollout in rollouts:
            self._add(rollout.prompt_id, rollout.token_ids)

    def read(self, trace: Path) -> None:
        """Begin with the newest responses of the trace of earlier attempts. Raises TraceError."""
        for prompt_id, token_ids in reversed(list(newest_responses(trace, self._most_tokens))):
            self._add(prompt_id, token_ids)

    def of(self, prompt_ids: Iterable[str]) -> dict[str, tuple[IntArray, ...]]:
        """The responses to these prompts, the newest last; without prompts that have none."""
        return {prompt_id: tuple(self._of[prompt_id]) for prompt_id in prompt_ids if prompt_id in self._of}

    def _add(self, prompt_id: str, token_ids: IntArray) -> None:
        if not len(token_ids):
            return
        responses = self._of.setdefault(prompt_id, deque())
        responses.append(token_ids.astype(np.int32))
        self._tokens += len(token_ids)
        if len(responses) > MOST_RESPONSES:
            self._tokens -= len(responses.popleft())
        self._of.move_to_end(prompt_id)
        while self._tokens > self._most_tokens:
            _, oldest = self._of.popitem(last=False)
            self._tokens -= sum(map(len, oldest))
