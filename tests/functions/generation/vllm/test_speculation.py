"""Real engines that speculate draw what an engine without speculation draws.

One engine of each kind, in the order of this file; the last test loads other weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import pytest_asyncio

from fakes.tiny_models import KV_GIB, VOCABULARY, TinyModel, make_tiny_model, perturbed, start_tiny_engine
from rlhfless.functions.generation.engine import Sampled, SampleRequest
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.records import FinishReason
from rlhfless.spec import EngineSpec, SpeculationSpec
from rlhfless.weights.check import PROBE_TOLERANCE, largest_difference
from rlhfless.weights.store import FolderStore

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

TOLERANCE = PROBE_TOLERANCE["float32"]
DEPTH = 4
SMALL_BATCHES = EngineSpec(kv_cache_gib=KV_GIB, max_sequences=32, max_batch_tokens=64)
"""A prompt of 100 tokens is prefilled in parts."""

TEMPERATURES = (0.0, 0.2, 0.3, 0.3, 0.6, 1.0)
"""The model is random: below 0.5 it repeats itself."""


UNSEEN = [SampleRequest(f"unseen {i}", (9, 8, 7, 6 - i), seed=i, max_tokens=120, temperature=1.0) for i in range(2)]
"""Prompts that no other request has."""


@dataclass
class Speculating:
    method: str
    engine: VllmEngine
    model: TinyModel
    store: FolderStore
    plain: dict[str, Sampled]
    """What an engine without speculation drew, by request."""


def requests() -> list[SampleRequest]:
    long = tuple(np.random.default_rng(2).integers(3, len(VOCABULARY), 100).tolist())
    prompts = [(5, 6, 7, 8), (5, 6, 7, 9), long]
    return [
        SampleRequest(f"{i} at {t}", prompts[i % 3], seed=40 + i, max_tokens=120, temperature=t)
        for i, t in enumerate(TEMPERATURES * 3)
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sampled]:
    model = make_tiny_model(tmp_path_factory.mktemp("model"), tied=True)
    engine = await start_tiny_engine(model, tmp_path_factory.mktemp("store"), SMALL_BATCHES)
    drawn = await asyncio.gather(*map(engine.sample, [*requests(), *UNSEEN]))
    await engine.stop()
    assert {sampled.drafted for sampled in drawn} == {()}
    return {sampled.request_id: sampled for sampled in drawn}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, plain: dict[str, Sampled]
) -> AsyncIterator[Speculating]:
    method, _, apart = request.param.partition(", ")
    model = make_tiny_model(tmp_path_factory.mktemp("model"), tied=True)
    store = FolderStore(tmp_path_factory.mktemp("store"))
    own = {"model": str(model.folder)} if method == "draft_model" else {}
    # A draft model of depth auto drafts up to DEPTH, too, and verifies other numbers from pass to pass.
    speculation = SpeculationSpec(method=method, depth="auto" if own else DEPTH, **own)
    shape = SMALL_BATCHES.model_copy(update={"core_process": bool(apart)})
    engine = await start_tiny_engine(model, store.folder, shape, speculation)
    yield Speculating(method, engine, model, store, plain)
    await engine.stop()


every = pytest.mark.parametrize(
    "case",
    [
        "suffix",
        pytest.param("auto", marks=pytest.mark.seldom),
        pytest.param("draft_model", marks=pytest.mark.seldom),
        pytest.param("ngram", marks=pytest.mark.seldom),
        pytest.param("suffix, core apart", marks=pytest.mark.seldom),
    ],
    indirect=True,
    scope="module",
)


def _sums(places: Sequence[tuple[int, ...]]) -> list[int]:
    return [sum(place) for place in zip(*places, strict=True)]


@every
async def test_samples_and_logprobs_are_those_without_speculation(case: Speculating) -> None:
    """Greedy and seeded, mixed in one batch; the second time with the first responses as drafts. Drafts are accepted
    and rejected at every place, so depths differ from pass to pass."""
    for _ in range(2):
        drawn = await asyncio.gather(*map(case.engine.sample, requests()))
        for sampled in drawn:
            expected = case.plain[sampled.request_id]
            assert sampled.token_ids == expected.token_ids
            assert sampled.finish_reason == expected.finish_reason
            assert largest_difference(sampled.logprobs, expected.logprobs) < TOLERANCE
        drafted, accepted = (_sums([getattr(sampled, name) for sampled in drawn]) for name in ("drafted", "accepted"))
        assert len(drafted) == len(accepted) == DEPTH
        for place in range(DEPTH):
            assert drafted[place] > accepted[place] > 0
        if case.method != "draft_model":
            assert drafted[0] > drafted[-1]


@pytest.mark.parametrize("case", ["suffix"], indirect=True, scope="module")
async def test_what_another_engine_drew_is_drafted(case: Speculating) -> None:
    """A response at temperature 1 that the engine has never seen comes nearly whole from what the loop knows of it;
    the first time, when it knows nothing, nearly nothing is accepted."""
    unknown, known = (case.plain[request.request_id].token_ids for request in UNSEEN)
    without = await case.engine.sample(UNSEEN[0])
    informed = await case.engine.sample(replace(UNSEEN[1], earlier=(known[::-1], known)))
    assert (without.token_ids, informed.token_ids) == (unknown, known)
    assert min(len(unknown), len(known)) > 20
    assert sum(without.accepted) < 0.1 * len(unknown)
    assert sum(informed.accepted) > 0.7 * len(known)
    assert sum(informed.accepted) > 0.9 * sum(informed.drafted)


@every
async def test_one_request_alone_draws_the_same(case: Speculating) -> None:
    for request in requests()[:3]:
        sampled = await case.engine.sample(request)
        assert sampled.token_ids == case.plain[request.request_id].token_ids


@every
@pytest.mark.parametrize("drawn_tokens", [1, 30])
async def test_a_continued_response_is_the_one_drawn_in_one_go(case: Speculating, drawn_tokens: int) -> None:
    """A move: another engine drew the beginning. What it knows of other responses is right here, wrong, or nothing."""
    drawn = {request.request_id: case.plain[request.request_id].token_ids for request in requests()}
    moved = [
        replace(
            whole,
            request_id=f"{whole.request_id} {len(earlier)}",
            token_ids=whole.token_ids + drawn[whole.request_id][:drawn_tokens],
            max_tokens=whole.max_tokens - drawn_tokens,
            drawn_tokens=drawn_tokens,
            earlier=earlier,
        )
        for whole in requests()
        if len(drawn[whole.request_id]) > drawn_tokens
        for earlier in ((), (drawn[whole.request_id], drawn[whole.request_id][::-1]))
    ]
    for rest, sampled in zip(moved, await asyncio.gather(*map(case.engine.sample, moved)), strict=True):
        assert sampled.token_ids == drawn[rest.request_id.rpartition(" ")[0]][drawn_tokens:]


@every
async def test_ends_in_the_middle_of_a_pass(case: Speculating) -> None:
    """By length, by a token, and by a text; what the pass drew beyond the end is dropped, with its logprobs."""
    request = replace(requests()[1], earlier=(case.plain[requests()[1].request_id].token_ids,))
    whole = case.plain[request.request_id].token_ids
    place = next(i for i in range(5, len(whole)) if whole[i] not in whole[:i])
    for changes, reason in (
        ({"max_tokens": place + 1}, FinishReason.LENGTH),
        ({"stop_token_ids": (whole[place],)}, FinishReason.STOP),
        ({"stop": (VOCABULARY[whole[place]],)}, FinishReason.STOP),
    ):
        ended = await case.engine.sample(replace(request, **changes))
        assert (ended.finish_reason, ended.token_ids) == (reason, whole[: place + 1])
        assert len(ended.logprobs) == place + 1


@every
async def test_samples_go_on_with_weights_that_are_loaded_in_flight(case: Speculating) -> None:
    """Tokens before the load are those of the seed; logprobs after it are the new weights'."""
    tensors = {name: tensor.clone() for name, tensor in case.model.tensors().items()}
    old = case.model.publish(case.store.put("run", 1, 1, tensors))
    await case.engine.load(old)
    changed = perturbed(tensors, seed=21)
    case.model.use(changed)
    new = case.model.publish(case.store.put("run", 1, 2, changed))
    asked = [replace(requests()[4], request_id=f"f{i}", max_tokens=500) for i in range(24)]
    whole = (await case.engine.sample(replace(asked[0], request_id="whole"))).token_ids
    running = [asyncio.create_task(case.engine.sample(request)) for request in asked]
    async with asyncio.timeout(60):
        while max(case.engine.progress().values(), default=0) < 5:
            await asyncio.sleep(0.01)
    await case.engine.load(new, in_flight=True)
    both = [sampled for sampled in await asyncio.gather(*running) if len(sampled.version_spans) == 2]
    assert both, "some had drawn a part"
    for sampled in both[:4]:
        first, second = sampled.version_spans
        assert (first.version, second.version) == (old.version.label, new.version.label)
        assert (first.end, second.end) == (second.start, len(sampled.token_ids))
        assert sampled.token_ids[: first.end] == whole[: first.end]
        tokens = asked[0].token_ids + sampled.token_ids
        after = case.model.logprobs(tokens, asked[0].temperature)[len(asked[0].token_ids) - 1 + first.end :]
        assert largest_difference(sampled.logprobs[first.end :], after) < TOLERANCE
