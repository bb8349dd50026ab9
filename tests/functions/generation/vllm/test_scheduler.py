"""Our schedulers keep tokens and logprobs in the core, and lose none: vLLM's engine core and front end are real, the
model is not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from fakes.tiny_models import make_tiny_model
from rlhfless.functions.generation.engine import LoadReport, Sampled, SampleRequest
from rlhfless.records import FinishReason, Probe, PublishedWeights, VersionSpan, WeightVersion

if TYPE_CHECKING:
    from rlhfless.functions.generation.vllm.core import Core

CASES = pytest.mark.parametrize(
    "case", [{}, {"asynchronous": True}, {"several": True}], ids=["synchronous", "asynchronous", "several tokens"]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), tied=True).folder


def prompt_of(number: int) -> tuple[int, ...]:
    return (5, 6, 7, 3 + number % 90, 3 + number // 90)


def request(number: int, most: int = 40, **changes: Any) -> SampleRequest:
    return SampleRequest(str(number), prompt_of(number), seed=number, max_tokens=most, temperature=1.0, **changes)


def require_exact(sampled: Sampled) -> None:
    from fake_core import logprob_at, token_at

    prompt, places = prompt_of(int(sampled.request_id)), range(len(sampled.token_ids))
    assert sampled.token_ids == tuple(token_at(prompt, place) for place in places)
    assert sampled.logprobs == tuple(logprob_at(prompt, place) for place in places)


def generated(core: Core) -> dict[str, int]:
    """Tokens of each unfinished request, as the scheduler counts them."""
    scheduler: Any = core._engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    return {name: scheduler.requests[core._internal_ids[name]].num_output_tokens for name in core._requests}


def steps(core: Core, count: int) -> list[Sampled]:
    return [sampled for _ in range(count) for sampled in core.step()]


def rest(core: Core) -> list[Sampled]:
    ended: list[Sampled] = []
    while core.busy:
        ended += core.step()
    return ended


@CASES
def test_responses_are_exact_and_progress_is_at_most_one_message_old(case: dict[str, bool], model: Path) -> None:
    from fake_core import fake_core

    from rlhfless.functions.generation.vllm.scheduler import EVERY

    widest = 3 if case.get("several") else 1
    with fake_core(model, **case) as core:
        for number in range(40):
            core.submit(request(number, 25 + number))
        early = steps(core, 20 // widest)
        told, true = core.progress(), generated(core)
        assert all(0 <= true[name] - told[name] <= EVERY * widest for name in told)
        assert any(told.values())
        ended = early + rest(core)
    assert [len(one.token_ids) for one in sorted(ended, key=lambda one: int(one.request_id))] == [*range(25, 65)]
    for sampled in ended:
        require_exact(sampled)
        assert sampled.finish_reason is FinishReason.LENGTH
        assert sampled.version_spans == (VersionSpan("default", 0, len(sampled.token_ids)),)


@CASES
def test_an_abort_returns_every_token_that_was_generated(case: dict[str, bool], model: Path) -> None:
    from fake_core import fake_core

    with fake_core(model, **case) as core:
        for number in range(20):
            core.submit(request(number, 100))
        steps(core, 13)
        before = generated(core)
        aborted = core.abort(tuple(map(str, range(0, 20, 2))))
        expected = {name: count for name, count in before.items() if int(name) % 2 == 0}
        assert {one.request_id: len(one.token_ids) for one in aborted} == expected
        assert all(one.finish_reason is FinishReason.ABORT for one in aborted)
        assert min(before.values()) > 8
        core.submit(request(50, 100))
        (waiting,) = core.abort(("50",))  # it has generated nothing
        assert waiting.token_ids == waiting.logprobs == waiting.version_spans == ()
        others = rest(core)
    assert {len(one.token_ids) for one in others} == {100}
    for sampled in [*aborted, *others]:
        require_exact(sampled)


@CASES
def test_no_token_crosses_a_change_of_version(case: dict[str, bool], model: Path) -> None:
    from fake_core import fake_core

    new = PublishedWeights(WeightVersion("run", 0, 1, "hash"), "nowhere", 0, 0, Probe((), ()))
    report = LoadReport("", 0, 0, 0, 0.0)
    with fake_core(model, **case) as core, mock.patch.object(core, "_update", return_value=report):
        for number in range(20):
            core.submit(request(number, 90))
        steps(core, 21)
        core.load(new, in_flight=True)
        loaded_at = generated(core)
        assert core.progress() == loaded_at  # all of it was sent with the version that generated it
        ended = rest(core)
    for sampled in ended:
        require_exact(sampled)
        first = loaded_at[sampled.request_id]
        assert sampled.version_spans == (VersionSpan("default", 0, first), VersionSpan(new.version.label, first, 90))


def test_requests_with_stop_texts_send_each_token(model: Path) -> None:
    from fake_core import fake_core, token_at

    from fakes.tiny_models import VOCABULARY

    stop = VOCABULARY[token_at(prompt_of(1), 11)]
    first = next(place for place in range(12) if VOCABULARY[token_at(prompt_of(1), place)] == stop)
    with fake_core(model) as core:
        core.submit(request(1, 90, stop=(stop,)))
        (sampled,) = steps(core, first + 1)
        assert not core.busy
    require_exact(sampled)
    assert (len(sampled.token_ids), sampled.finish_reason) == (first + 1, FinishReason.STOP)


def test_a_token_costs_a_sixteenth_of_the_messages(model: Path) -> None:
    """256 requests of 64 tokens: vLLM's own scheduler sends an output with three arrays for each token."""
    from fake_core import encoded, fake_core

    sent: dict[bool, tuple[float, float]] = {}
    for own in (False, True):
        messages: list[tuple[int, int]] = []
        with fake_core(model, own=own) as core, encoded(core, messages):
            for number in range(256):
                core.submit(request(number, 64))
            for sampled in rest(core):
                require_exact(sampled)
        tokens = 256 * 64
        sent[own] = sum(count for count, _ in messages) / tokens, sum(size for _, size in messages) / tokens
    assert sent[False][0] == 1
    assert sent[True][0] <= 1 / 12  # 4 full messages of 64 tokens, and the shorter first one
    assert sent[True][1] <= 0.25 * sent[False][1]
