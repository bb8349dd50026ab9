"""The routes that a real engine records, against those of Hugging Face's routers for the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from fakes.tiny_models import SHAPES, TinyModel, make_tiny_experts, perturbed, start_tiny_engine
from rlhfless.functions.generation.engine import SampleRequest
from rlhfless.functions.generation.rollouter import PriorTurn, continued
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.functions.route_files import RouteFiles
from rlhfless.records import FinishReason, RouteSpan
from rlhfless.records.routes import name_of
from rlhfless.spec import SpeculationSpec
from rlhfless.weights.store import FolderStore

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

PROMPT = tuple(range(5, 80))  # longer than two blocks, so that requests hit the prefix cache
CASES = [
    ("one process", "off"),
    pytest.param(("one process", "ngram"), marks=pytest.mark.long),
    pytest.param(("core apart", "off"), marks=[pytest.mark.long, pytest.mark.seldom]),
    pytest.param(("two devices", "off"), marks=[pytest.mark.long, pytest.mark.seldom]),
]


@dataclass
class Case:
    engine: VllmEngine
    model: TinyModel
    folder: Path
    store: FolderStore

    def rows(self, spans: Sequence[RouteSpan], tokens: int) -> np.ndarray:
        """Return the routes of a response `[tokens, layers, k]`, -1 where it has none."""
        found = np.full((tokens, 2, 2), -1)
        for span in spans:
            numbers = np.arange(span.row, span.row + span.end - span.start)
            source = RouteFiles(self.folder, 2, 2)
            found[span.start : span.end] = source.rows([span.file], np.zeros_like(numbers), numbers)
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CASES, ids=", ".join)
async def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Case]:
    shape, method = request.param
    folder, routes = tmp_path_factory.mktemp("engine"), tmp_path_factory.mktemp("run") / "routes"
    model, store = make_tiny_experts(folder / "model"), FolderStore(folder / "store")
    speculation = SpeculationSpec(method=method)
    engine = await start_tiny_engine(model, store.folder, SHAPES[shape], speculation, routes_folder=str(routes))
    yield Case(engine, model, routes, store)
    await engine.stop()


@torch.no_grad()
def routes_of(model: TinyModel, token_ids: Sequence[int]) -> np.ndarray:
    """Return the experts that transformers' routers choose for each token, `[tokens, layers, k]`, sorted."""
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
        for layer in model.model.model.layers
    ]
    model.model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(chosen, 1).numpy(), -1)


def asked(name: str, **changes: Any) -> SampleRequest:
    request = SampleRequest(name, PROMPT, seed=11, max_tokens=24, temperature=1.0, routes=name_of(1))
    return replace(request, **changes)


async def test_routes_of_many_requests_are_those_of_hugging_face(case: Case) -> None:
    """They differ in length, are admitted at different times, and share prompts that only one of them computes."""
    requests = [
        asked(f"r{i}", token_ids=PROMPT[: 40 + 5 * (i % 3)], seed=i, max_tokens=3 + 7 * i % 40 + 2, routes=name_of(1))
        for i in range(24)
    ]
    for request, sampled in zip(requests, await asyncio.gather(*map(case.engine.sample, requests)), strict=True):
        tokens = len(sampled.token_ids)
        (span,) = sampled.routes
        assert span == RouteSpan(request.routes, 0, tokens - 1)
        assert np.load(case.folder / span.file).dtype == np.uint8
        expected = routes_of(case.model, request.token_ids + sampled.token_ids)[len(request.token_ids) :]
        found = case.rows(sampled.routes, tokens)
        np.testing.assert_array_equal(np.sort(found[:-1], -1), expected[:-1])
        assert (found[-1] == -1).all(), "the last token was not computed"


async def test_a_request_that_asks_for_none_gets_none(case: Case) -> None:
    sampled = await case.engine.sample(asked("none", routes=""))
    assert sampled.routes == ()


async def test_a_response_of_one_token_has_none(case: Case) -> None:
    sampled = await case.engine.sample(asked("one", max_tokens=1))
    assert sampled.routes == ()
    assert len(sampled.token_ids) == 1


async def test_a_moved_response_has_the_routes_of_each_engine_that_drew_it(case: Case) -> None:
    whole = await case.engine.sample(asked("whole"))
    expected = case.rows(whole.routes, len(whole.token_ids))
    begun = await case.engine.sample(asked("begun", max_tokens=10))
    prior = PriorTurn(begun.token_ids, np.asarray(begun.logprobs, np.float32), begun.version_spans, "", begun.routes)

    async def generate(token_ids: Any, *, seed: int, max_tokens: int, generated: int, response: int) -> Any:
        assert response == generated == 9
        rest = asked("rest", token_ids=token_ids, seed=seed, max_tokens=max_tokens - generated, drawn_tokens=generated)
        return await case.engine.sample(rest)

    moved = await continued(generate, PROMPT, prior, seed=11, max_tokens=24)
    assert moved.token_ids == whole.token_ids
    files = [span.file for span in moved.routes]
    assert len(set(files)) == 2
    assert [(span.start, span.end) for span in moved.routes] == [(0, 9), (9, len(whole.token_ids) - 1)]
    np.testing.assert_array_equal(case.rows(moved.routes, len(moved.token_ids)), expected)


async def test_an_aborted_response_has_the_routes_so_far(case: Case) -> None:
    request = asked("long", max_tokens=800, stop_token_ids=())
    sampling = asyncio.create_task(case.engine.sample(request))
    while not sampling.done() and not case.engine.progress().get("long"):
        await asyncio.sleep(0.01)
    await case.engine.abort(["long"])
    sampled = await sampling
    tokens = len(sampled.token_ids)
    if sampled.finish_reason is FinishReason.ABORT:
        expected = routes_of(case.model, PROMPT + sampled.token_ids)[len(PROMPT) :]
        found = case.rows(sampled.routes, tokens)
        covered = (found >= 0).all((1, 2))
        assert covered[:-1].all()
        np.testing.assert_array_equal(np.sort(found[:-1], -1), expected[:-1])


async def test_other_weights_have_other_routes(case: Case) -> None:
    """Also in flight, where tokens so far are computed again: they keep the routes with which they were computed."""
    before = await case.engine.sample(asked("before"))
    running = asyncio.create_task(case.engine.sample(asked("running", max_tokens=600)))
    while not running.done() and not case.engine.progress().get("running"):
        await asyncio.sleep(0.01)
    case.model.use(perturbed(case.model.tensors(), seed=3))
    stored = case.store.put("run", 1, 1, case.model.tensors())
    await case.engine.load(case.model.publish(stored, samples=False), in_flight=True)
    after = await case.engine.sample(asked("after", token_ids=PROMPT + before.token_ids, seed=2))
    whole = PROMPT + before.token_ids + after.token_ids
    expected = routes_of(case.model, whole)[len(PROMPT + before.token_ids) :]
    found = case.rows(after.routes, len(after.token_ids))
    np.testing.assert_array_equal(np.sort(found[:-1], -1), expected[:-1])
    sampled = await running
    rows = case.rows(sampled.routes, len(sampled.token_ids))
    assert (rows[:-1] >= 0).all()
    if len(sampled.version_spans) == 2:
        first = sampled.version_spans[0].end
        same = (
            np.sort(rows[: first - 1], -1)
            == routes_of(case.model, PROMPT + sampled.token_ids)[len(PROMPT) :][: first - 1]
        )
        assert not same.all(), "they are of the weights before"
