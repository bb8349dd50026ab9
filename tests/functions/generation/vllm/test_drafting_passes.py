"""The passes of a model runner that can speculate, with a runner that draws what the test says.

vLLM is imported in the tests: it takes seconds, in each process that reads this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.engine

DEPTH = 2
PROMPT = [1, 2, 3, 4]
CONFIG = SimpleNamespace(num_speculative_tokens=DEPTH)


class FakeRunner:
    """Has one request, `a`, and remembers which passes had the setting to speculate."""

    def __init__(self, drafter: Any, *, hybrid: bool = False) -> None:
        self.speculative_config: Any = CONFIG
        self.model_config = SimpleNamespace(is_hybrid=hybrid)
        self.drafter = drafter
        state = SimpleNamespace(
            prompt_token_ids=PROMPT, output_token_ids=[], sampling_params=SimpleNamespace(extra_args=None)
        )
        self.requests = {"a": state}
        self.input_batch = SimpleNamespace(num_tokens_no_spec=np.array([len(PROMPT)]))
        self.prepared: list[bool] = []
        self.drawn: list[int] = []
        self._draft_token_ids: Any = None
        self._draft_token_req_ids: Any = None

    def execute_model(self, scheduled: Any) -> None:
        self.prepared.append(self.speculative_config is not None)

    def sample_tokens(self, grammar: Any) -> Any:
        self._draft_token_ids = self._draft_token_req_ids = None
        self.requests["a"].output_token_ids.extend(self.drawn)
        self.input_batch.num_tokens_no_spec[0] += len(self.drawn)
        return SimpleNamespace(req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=[list(self.drawn)])

    def propose_draft_token_ids(self, *arguments: Any) -> None: ...


def runner_of(**changes: Any) -> tuple[FakeRunner, Any]:
    from rlhfless.functions.generation.vllm.drafting import DraftingPasses, SuffixDrafter

    config: Any = SimpleNamespace(speculative_config=CONFIG, model_config=SimpleNamespace(max_model_len=100))
    runner = FakeRunner(SuffixDrafter(config), **{"hybrid": False, **changes})
    return runner, DraftingPasses


def run(runner: FakeRunner, drawn: Sequence[int], drafts: Sequence[int] = (), finished: Sequence[str] = ()) -> Any:
    """A pass that verifies `drafts` and draws `drawn`. Returns the drafts of the next."""
    scheduled = SimpleNamespace(
        scheduled_spec_decode_tokens={"a": list(drafts)} if drafts else {}, finished_req_ids=set(finished)
    )
    runner.drawn = list(drawn)
    runner.execute_model(scheduled)
    runner.sample_tokens(None)
    return runner._draft_token_ids


def test_only_passes_that_verify_are_prepared_for_drafts() -> None:
    """The response repeats itself: 5 6 7 8, and again 5 6 7, after which 8 5 is drafted."""
    runner, passes = runner_of()
    spent = passes(runner, measured=False)
    assert [run(runner, [token]) for token in (5, 6, 7, 8, 5, 6)] == [None] * 6
    assert spent.times()[1] == 0
    assert run(runner, [7]) == [[8, 5]]
    assert runner._draft_token_req_ids == ["a"]
    assert run(runner, [8, 5, 6], drafts=[8, 5]) == [[7, 8]]
    assert run(runner, [9], drafts=[7, 8]) == [[]]
    assert run(runner, [9]) is None
    assert runner.prepared == [False] * 7 + [True, True, False]
    draft_s, verify_s = spent.times()
    assert draft_s > 0
    assert verify_s > 0
    assert spent.times() == (0, 0)


def test_recurrent_layers_are_told_of_drafts_that_are_not_there() -> None:
    runner, passes = runner_of(hybrid=True)
    passes(runner, measured=False)
    run(runner, [5])
    assert runner.prepared == [True]


def test_where_drafts_are_measured_to_lose_passes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock says that verifying takes a hundred times as long. Nothing is drafted from then on, but for retries;
    a response that ends meanwhile is known to its siblings all the same."""
    from rlhfless.functions.generation.vllm import drafting as module

    now_s = 0.0
    monkeypatch.setattr(module.time, "perf_counter", lambda: now_s)
    runner, passes = runner_of()
    passes(runner, measured=True)
    drafts: list[int] = []
    drafted = []
    for number in range(80):
        now_s += 1.0 if not drafts else 100.0
        answer = run(runner, [5 + number % 3], drafts)
        drafts = answer[0] if answer else []
        drafted.append(bool(drafts))
    assert any(drafted[:30])
    assert not any(drafted[40:])
    seen = len(runner.requests["a"].output_token_ids)
    run(runner, [9], finished=["a"])
    (suffixes,) = runner.drafter._suffixes.values()
    assert suffixes.length("a") == seen
