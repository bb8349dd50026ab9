"""The real engine, against Hugging Face: a model with a tied output head and one without, in the process shapes that
CPUs and GPUs use.

One engine per case. The last test leaves it unusable; tests run in the order of this file.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import pytest_asyncio
import torch

from fakes.repository import TESTS
from fakes.tiny_models import (
    CONTEXT_TOKENS,
    PROBE_TOKENS,
    VOCABULARY,
    TinyModel,
    make_tiny_model,
    perturbed,
    start_tiny_engine,
    tiny_settings,
)
from rlhfless.functions.generation.engine import (
    Engine,
    EngineAsleep,
    EngineBusy,
    EngineDead,
    EngineError,
    SampleRequest,
)
from rlhfless.functions.generation.vllm.arguments import CPU_BLOCK_TOKENS
from rlhfless.prefixes.tree import to_precompute
from rlhfless.prefixes.trie import shared_prefixes
from rlhfless.records import FinishReason, SleepTier, Slept, VersionSpan
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.memory import kv_token_bytes
from rlhfless.spec import EngineSpec
from rlhfless.weights.check import (
    PROBE_TOLERANCE,
    WeightCheckFailed,
    check_probe,
    largest_difference,
)
from rlhfless.weights.store import FolderStore

sys.path.append(str(TESTS / "extending" / "own"))

from plain_engine import PlainEngine

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

TOLERANCE = PROBE_TOLERANCE["float32"]
LONG = CONTEXT_TOKENS - 10


@dataclass
class Case:
    tied: bool
    engine: Engine
    model: TinyModel
    store: FolderStore
    plain: bool

    @property
    def many(self) -> int:
        """Requests that take seconds together, several times as many as run at once: some are unfinished whatever else
        the machine does."""
        return 32 if self.plain else 256


TWO_DEVICES = ("untied", "two devices")
CASES = [
    ("tied", "one process"),
    pytest.param(("tied", "core apart"), marks=[pytest.mark.long, pytest.mark.seldom]),
    pytest.param(TWO_DEVICES, marks=[pytest.mark.long, pytest.mark.seldom]),
]
PLAIN = ("tied", "plain loop")
"""An engine that is not vLLM: tests/extending/own/plain_engine.py."""

contract = pytest.mark.parametrize("case", [*CASES, PLAIN], indirect=True, ids=", ".join, scope="module")
"""What every engine promises (rlhfless/functions/generation/engine.py)."""

contract_of_weights = pytest.mark.parametrize(
    "case",
    [*CASES[:-1], pytest.param(TWO_DEVICES, marks=pytest.mark.long), PLAIN],
    indirect=True, ids=", ".join, scope="module",
)  # fmt: skip
"""`contract` about what is split over devices, which CI looks at with two of them as well."""

of_vllm = pytest.mark.parametrize("case", CASES, indirect=True, ids=", ".join, scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def case(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Case]:
    head, shape = request.param
    model = make_tiny_model(tmp_path_factory.mktemp("model"), tied=head == "tied")
    store = FolderStore(tmp_path_factory.mktemp("store"))
    if shape == PLAIN[1]:
        engine: Engine = await PlainEngine.start(tiny_settings(model, store.folder, EngineSpec()))
    else:
        engine = await start_tiny_engine(model, store.folder, shape)
    yield Case(head == "tied", engine, model, store, plain=shape == PLAIN[1])
    await engine.stop()
    assert engine.pids == ()


def _request(name: str, **changes: object) -> SampleRequest:
    # Token 1 ends a sequence; the prompt differs from request to request by its last token.
    request = SampleRequest(name, (5, 6, 7, 8), seed=11, max_tokens=24, temperature=1.0)
    return replace(request, **changes)  # type: ignore[arg-type]


@contract
@pytest.mark.parametrize("drawn_tokens", [1, 9, 23])
async def test_a_continued_response_is_the_one_drawn_in_one_go(case: Case, drawn_tokens: int) -> None:
    whole = _request("whole", temperature=1.3)
    expected = (await case.engine.sample(whole)).token_ids
    assert len(expected) > drawn_tokens
    rest = _request(
        "rest",
        temperature=1.3,
        token_ids=whole.token_ids + expected[:drawn_tokens],
        max_tokens=whole.max_tokens - drawn_tokens,
        drawn_tokens=drawn_tokens,
    )
    assert (await case.engine.sample(rest)).token_ids == expected[drawn_tokens:]


@contract_of_weights
async def test_greedy_tokens_and_logprobs_are_those_of_hugging_face(case: Case) -> None:
    sampled = await case.engine.sample(_request("greedy", temperature=0.0, seed=None))
    prompt = _request("greedy").token_ids
    with torch.no_grad():
        expected = list(prompt)
        for _ in sampled.token_ids:
            expected.append(int(case.model.model(torch.tensor([expected])).logits[0, -1].argmax()))
    assert list(prompt + sampled.token_ids) == expected
    logprobs = case.model.logprobs(prompt + sampled.token_ids)[len(prompt) - 1 :]
    assert largest_difference(sampled.logprobs, logprobs) < TOLERANCE


@of_vllm
async def test_the_most_likely_first_tokens_are_those_of_hugging_face(case: Case) -> None:
    asked, other = _request("likely", top_logprobs=5), _request("other")
    sampled, alone = await asyncio.gather(case.engine.sample(asked), case.engine.sample(other))
    with torch.no_grad():
        logits = case.model.model(torch.tensor([asked.token_ids])).logits[0, -1]
    values, token_ids = torch.log_softmax(logits, -1).topk(5)
    assert [text for text, _ in sampled.first] == [VOCABULARY[token] for token in token_ids.tolist()]
    assert largest_difference([value for _, value in sampled.first], values.tolist()) < TOLERANCE
    assert len(sampled.logprobs) == len(sampled.token_ids)
    assert alone.first == ()


@contract
@pytest.mark.parametrize("temperature", [0.6, 1.0])
async def test_logprobs_are_at_the_sampling_temperature(case: Case, temperature: float) -> None:
    request = _request("sampled", temperature=temperature)
    sampled = await case.engine.sample(request)
    expected = case.model.logprobs(request.token_ids + sampled.token_ids, temperature)
    assert len(sampled.token_ids) > 4
    assert largest_difference(sampled.logprobs, expected[len(request.token_ids) - 1 :]) < TOLERANCE


@of_vllm
async def test_the_memory_plan_knows_the_kv_cache(case: Case) -> None:
    """One key head, which each of two devices keeps."""
    shape = ModelShape.of_config(json.loads((case.model.folder / "config.json").read_text()) | {"dtype": "float32"})
    engine = case.engine.settings.engine
    per_token = kv_token_bytes(shape, "float32", engine.devices_per_actor)
    assert engine.kv_cache_gib is not None
    assert case.engine.kv_capacity_tokens == pytest.approx(engine.kv_cache_gib * 2**30 / per_token, rel=0.01)


@contract
async def test_prompt_logprobs(case: Case) -> None:
    measured = await case.engine.logprobs(PROBE_TOKENS)
    assert largest_difference(measured, case.model.logprobs(PROBE_TOKENS)) < TOLERANCE


@contract
async def test_seeded_samples_do_not_depend_on_their_company(case: Case) -> None:
    requests = [_request(f"s{i}", seed=100 + i, token_ids=(5, 6, 7, 8 + i % 3)) for i in range(12)]
    together = await asyncio.gather(*(case.engine.sample(request) for request in requests))
    alone = [await case.engine.sample(request) for request in requests]
    shuffled = await asyncio.gather(*(case.engine.sample(request) for request in requests[::-1]))
    assert [sample.token_ids for sample in together] == [sample.token_ids for sample in alone]
    assert [sample.token_ids for sample in together] == [sample.token_ids for sample in shuffled[::-1]]
    for one, other in zip(together, alone, strict=True):
        assert largest_difference(one.logprobs, other.logprobs) < TOLERANCE
    assert len({sample.token_ids for sample in together}) == len(requests)  # the seeds matter


@contract
async def test_ends(case: Case) -> None:
    long = await case.engine.sample(_request("long", max_tokens=9))
    assert (long.finish_reason, len(long.token_ids)) == (FinishReason.LENGTH, 9)
    assert long.text == "".join(VOCABULARY[token] for token in long.token_ids)
    # The same draw again; now its fifth token is a stop token, or its text a stop text.
    fifth = long.token_ids[4]
    assert fifth not in long.token_ids[:4]
    by_token = await case.engine.sample(_request("token", max_tokens=9, stop_token_ids=(fifth,)))
    assert (by_token.finish_reason, by_token.token_ids) == (FinishReason.STOP, long.token_ids[:5])
    by_text = await case.engine.sample(_request("text", max_tokens=9, stop=(VOCABULARY[fifth],)))
    assert (by_text.finish_reason, by_text.token_ids) == (FinishReason.STOP, long.token_ids[:5])
    assert by_text.text == "".join(VOCABULARY[token] for token in long.token_ids[:5])
    assert len(by_text.logprobs) == 5
    first = VOCABULARY[long.token_ids[0]]
    assert (await case.engine.sample(_request("first", stop=(first,)))).text == first


@contract
async def test_a_stop_text_may_be_a_special_token(case: Case) -> None:
    requests = [_request(f"b{i}", seed=i, max_tokens=LONG) for i in range(48)]
    samples = await asyncio.gather(*map(case.engine.sample, requests))
    request, sample = next(pair for pair in zip(requests, samples, strict=True) if 0 in pair[1].token_ids[1:])
    stopped = await case.engine.sample(replace(request, stop=("<bos>",)))
    assert stopped.token_ids == sample.token_ids[: sample.token_ids.index(0) + 1]
    assert stopped.text == "".join(VOCABULARY[token] for token in stopped.token_ids)


@contract
async def test_the_end_of_sequence_token_ends(case: Case) -> None:
    samples = await asyncio.gather(*(case.engine.sample(_request(f"e{i}", seed=i, max_tokens=LONG)) for i in range(48)))
    stopped = [sample for sample in samples if sample.finish_reason is FinishReason.STOP]
    assert stopped
    for sample in stopped:
        assert sample.token_ids[-1] == 1
        assert 1 not in sample.token_ids[:-1]
        assert "<eos>" not in sample.text


async def _long_request(case: Case) -> tuple[SampleRequest, tuple[int, ...]]:
    """The longest of some requests, and its whole response. About one of 97 drawn tokens ends a sequence."""
    requests = [_request("long", request_id=f"seed {seed}", seed=seed, max_tokens=LONG) for seed in range(16)]
    sampled = await asyncio.gather(*(case.engine.sample(request) for request in requests))
    request, longest = max(zip(requests, sampled, strict=True), key=lambda pair: len(pair[1].token_ids))
    return request, longest.token_ids


@contract
async def test_abort_returns_the_partial_response(case: Case) -> None:
    request, whole = await _long_request(case)
    running = [asyncio.create_task(case.engine.sample(replace(request, request_id=f"p{i}"))) for i in range(case.many)]
    await asyncio.sleep(0.05)
    await case.engine.abort()
    samples = await asyncio.gather(*running)
    aborted = [sample for sample in samples if sample.finish_reason is FinishReason.ABORT]
    assert aborted
    for sample in samples:
        assert len(sample.logprobs) == len(sample.token_ids)
        assert sample.token_ids == whole[: len(sample.token_ids)]
        assert sample in aborted or sample.token_ids == whole
    assert case.engine.progress() == {}


@contract
async def test_a_prompt_that_is_too_long_is_refused(case: Case) -> None:
    with pytest.raises(EngineError, match=str(CONTEXT_TOKENS)):
        await case.engine.sample(_request("long", token_ids=(5,) * (CONTEXT_TOKENS + 1)))
    assert case.engine.usable


@of_vllm
@pytest.mark.parametrize("ahead", [True, False], ids=["precomputed", "by the first sample"])
async def test_a_shared_prefix_is_computed_once(case: Case, ahead: bool) -> None:
    """Four prompts of four samples each, with 512 tokens in common: 1.05 x what blocks of 32 allow, at most."""
    random, salt = np.random.default_rng(int(ahead)), f"prefix {ahead}"
    prefix = tuple(random.integers(3, len(VOCABULARY), 512).tolist())
    prompts = [(*prefix, *random.integers(3, len(VOCABULARY), 20).tolist()) for _ in range(4)]
    (first,) = to_precompute(prompts)
    assert first == prefix
    computed = 0
    if ahead:
        warm = await case.engine.sample(replace(_request(salt, token_ids=first), max_tokens=1, cache_salt=salt))
        computed += len(first) - warm.cached_tokens
    asked = [
        replace(_request(f"{salt} {i} {j}", token_ids=prompt), max_tokens=8, cache_salt=salt)
        for i, prompt in enumerate(prompts)
        for j in range(4)
    ]
    drawn = await asyncio.gather(*map(case.engine.sample, asked))
    computed += sum(len(one.token_ids) - sample.cached_tokens for one, sample in zip(asked, drawn, strict=True))
    assert computed <= 1.05 * shared_prefixes(prompts, 4, block_tokens=CPU_BLOCK_TOKENS).unique_tokens


@of_vllm
async def test_the_start_has_the_phases_that_vllm_reports_and_no_others(case: Case) -> None:
    phases = set(case.engine.start_seconds)  # type: ignore[attr-defined]
    assert len(phases & {"weights_disk", "weights_cache"}) == 1
    # On CPUs nothing is compiled by default, and there are no graphs.
    assert phases - {"weights_disk", "weights_cache"} == {"import", "configure", "build"}
    assert min(case.engine.start_seconds.values()) > 0  # type: ignore[attr-defined]
    chosen = {"runner": "V1", "attention": "CPU_ATTN", "sampler": "forward_cpu", "flashinfer": "off"}
    assert case.engine.backends == chosen  # type: ignore[attr-defined]


@contract_of_weights
async def test_other_weights_are_really_served(case: Case) -> None:
    """The check `moved`, the version label, and no KV of the old weights."""
    prompt = tuple(range(5, 5 + 70))
    await case.engine.sample(_request("warm", token_ids=prompt))
    before = await case.engine.logprobs(PROBE_TOKENS)
    old = await case.engine.sample(_request("old", token_ids=prompt))
    assert case.plain or old.cached_tokens == 64  # two blocks of 32

    tensors = perturbed(case.model.tensors(), seed=1)
    case.model.use(tensors)
    published = case.model.publish(case.store.put("run", 1, 1, tensors))
    report = await case.engine.load(published)
    assert report is not None
    assert (report.digest, report.tensors) == (published.version.digest, published.tensors)
    assert case.plain or report.read_back == report.tensors
    assert report.size_bytes == sum(tensor.nbytes for tensor in tensors.values())

    after = await case.engine.logprobs(PROBE_TOKENS)
    assert largest_difference(before, after) > 0.1
    check_probe(published.version, published.probe, after, TOLERANCE)
    sampled = await case.engine.sample(_request("new", token_ids=prompt))
    assert sampled.cached_tokens == 0
    assert sampled.version_spans == (VersionSpan(published.version.label, 0, len(sampled.token_ids)),)
    logprobs = case.model.logprobs(prompt + sampled.token_ids)[len(prompt) - 1 :]
    assert largest_difference(sampled.logprobs, logprobs) < TOLERANCE


@contract_of_weights
async def test_versions_follow_each_other(case: Case) -> None:
    for step in range(2, 6):
        tensors = perturbed(case.model.tensors(), seed=step)
        case.model.use(tensors)
        published = case.model.publish(case.store.put("run", 1, step, tensors))
        await case.engine.load(published)
        for older in case.store.versions()[:-1]:
            case.store.delete(older)
        measured = await case.engine.logprobs(PROBE_TOKENS)
        check_probe(published.version, published.probe, measured, TOLERANCE)
        assert await case.engine.load(published) is None
    assert case.engine.loaded == published.version


@contract
async def test_it_wakes_with_the_weights_with_which_it_fell_asleep(case: Case) -> None:
    request = _request("nap")
    before, version = await case.engine.sample(request), case.engine.loaded
    slept = await case.engine.sleep(SleepTier.HOST)
    assert slept.tier is SleepTier.HOST
    for refused in (case.engine.sample(request), case.engine.logprobs(PROBE_TOKENS)):
        with pytest.raises(EngineAsleep, match="wake it first"):
            await refused
    assert await case.engine.sleep(SleepTier.DROPPED) == Slept(SleepTier.HOST, 0, 0)  # it stays in its tier
    await case.engine.wake()
    await case.engine.wake()
    after = await case.engine.sample(request)
    assert (after.token_ids, after.cached_tokens, case.engine.loaded) == (before.token_ids, 0, version)


@contract_of_weights
async def test_what_was_dropped_serves_after_the_next_load(case: Case) -> None:
    for step in (6, 7):
        tensors = perturbed(case.model.tensors(), seed=step)
        case.model.use(tensors)
        published = case.model.publish(case.store.put("run", 1, step, tensors))
        slept = await case.engine.sleep(SleepTier.DROPPED)
        assert (slept.tier, case.engine.loaded) == (SleepTier.DROPPED, None)
        with pytest.raises(EngineAsleep, match="wake its weights first"):
            await case.engine.load(published)
        await case.engine.wake("weights")
        report = await case.engine.load(published)
        assert report is not None
        assert case.plain or report.read_back == report.tensors
        with pytest.raises(EngineAsleep, match="wake it first"):
            await case.engine.sample(_request("early"))
        await case.engine.wake("kv_cache")
        check_probe(published.version, published.probe, await case.engine.logprobs(PROBE_TOKENS), TOLERANCE)
        prompt = tuple(range(5, 5 + 70))
        sampled = await case.engine.sample(_request("new", token_ids=prompt))
        logprobs = case.model.logprobs(prompt + sampled.token_ids)[len(prompt) - 1 :]
        assert largest_difference(sampled.logprobs, logprobs) < TOLERANCE


@contract
async def test_what_was_dropped_is_never_drawn_with(case: Case) -> None:
    version = case.engine.loaded
    await case.engine.sleep(SleepTier.DROPPED)
    await case.engine.wake()
    with pytest.raises(EngineAsleep, match="load a version first"):
        await case.engine.sample(_request("gibberish"))
    published = case.model.publish(case.store.put("run", 1, 8, case.model.tensors()))
    assert version != published.version
    await case.engine.load(published)
    assert (await case.engine.sample(_request("well"))).token_ids


@contract
async def test_no_load_under_running_requests(case: Case) -> None:
    published = case.model.publish(case.store.put("run", 1, 9, perturbed(case.model.tensors(), seed=9)))
    requests = [_request(f"r{i}", seed=i, max_tokens=LONG) for i in range(case.many)]
    running = [asyncio.create_task(case.engine.sample(request)) for request in requests]
    await asyncio.sleep(0)  # now they are sent
    with pytest.raises(EngineBusy, match=r"[1-9]\d* unfinished requests"):
        await case.engine.load(published)
    with pytest.raises(EngineBusy, match=r"[1-9]\d* unfinished requests"):
        await case.engine.sleep(SleepTier.HOST)
    await case.engine.abort()
    label = case.engine.loaded.label if case.engine.loaded else ""
    for sample in await asyncio.gather(*running):
        assert {span.version for span in sample.version_spans} <= {label}
    assert case.engine.usable


@of_vllm
async def test_samples_go_on_with_weights_that_are_loaded_in_flight(case: Case) -> None:
    """Each token's logprob is that of the version that its span names, given all tokens before it: no KV of the version
    before is left, for them or for others."""
    tensors = {name: tensor.clone() for name, tensor in case.model.tensors().items()}
    old = case.model.publish(case.store.put("run", 1, 20, tensors))
    await case.engine.load(old)
    request, whole = await _long_request(case)
    running = [asyncio.create_task(case.engine.sample(replace(request, request_id=f"f{i}"))) for i in range(case.many)]
    async with asyncio.timeout(60):
        while max(case.engine.progress().values(), default=0) < 5:
            await asyncio.sleep(0.01)
    changed = perturbed(tensors, seed=21)
    case.model.use(changed)
    new = case.model.publish(case.store.put("run", 1, 21, changed))
    await case.engine.load(new, in_flight=True)
    probe = await case.engine.logprobs(PROBE_TOKENS)
    later = await case.engine.sample(_request("later", token_ids=request.token_ids))
    samples = await asyncio.gather(*running)
    check_probe(new.version, new.probe, probe, TOLERANCE)
    assert later.version_spans == (VersionSpan(new.version.label, 0, len(later.token_ids)),)
    both = [sampled for sampled in samples if len(sampled.version_spans) == 2]
    assert both, "some had drawn a part"
    start = len(request.token_ids) - 1
    for sampled in both[:8]:
        first, second = sampled.version_spans
        assert (first.version, second.version) == (old.version.label, new.version.label)
        assert (first.start, first.end, second.end) == (0, second.start, len(sampled.token_ids))
        assert sampled.token_ids[: first.end] == whole[: first.end], "with the seed's numbers"
        tokens = request.token_ids + sampled.token_ids
        case.model.use(tensors)
        before = case.model.logprobs(tokens)[start : start + first.end]
        case.model.use(changed)
        after = case.model.logprobs(tokens)[start + first.end :]
        assert largest_difference(sampled.logprobs[: first.end], before) < TOLERANCE
        assert largest_difference(sampled.logprobs[first.end :], after) < TOLERANCE
    assert case.engine.loaded == new.version


@of_vllm
async def test_the_probe_is_computed_before_what_waits(case: Case) -> None:
    """Behind it, a load in the midst of a draw would take as long as the draw."""
    request, _ = await _long_request(case)
    running = [asyncio.create_task(case.engine.sample(replace(request, request_id=f"w{i}"))) for i in range(case.many)]
    async with asyncio.timeout(60):
        while max(case.engine.progress().values(), default=0) < 5:
            await asyncio.sleep(0.01)
    changed = perturbed(case.model.tensors(), seed=22)
    case.model.use(changed)
    published = case.model.publish(case.store.put("run", 1, 22, changed))
    await case.engine.load(published, in_flight=True)
    await case.engine.logprobs(PROBE_TOKENS)
    await case.engine.abort()
    reasons = [sampled.finish_reason for sampled in await asyncio.gather(*running)]
    assert reasons.count(FinishReason.ABORT) > case.many / 2


@contract_of_weights
async def test_a_wrong_load_is_caught_and_final(case: Case) -> None:
    """Tied: the bytes of the version before, one tiny step away. Untied: one tensor is missing."""
    old = {name: tensor.detach().bfloat16() for name, tensor in case.model.tensors().items()}
    case.model.use({name: tensor.float() for name, tensor in old.items()})
    before = case.model.publish(case.store.put("run", 1, 10, old), samples=False)  # in another format than the engine's
    await case.engine.load(before)
    if case.tied:
        new = {name: (tensor.float() + 1e-6).bfloat16() for name, tensor in old.items()}
        after = case.model.publish(case.store.put("run", 1, 11, new), samples=False)
        case.model.use({name: tensor.float() for name, tensor in new.items()})
        moved = largest_difference(before.probe.logprobs, case.model.logprobs(PROBE_TOKENS))
        assert moved < PROBE_TOLERANCE["bfloat16"]  # no probe could tell the two apart
        wrong = replace(after, location=before.location)
        message = f"digest {before.version.digest}: another version's"
    else:
        partial = {name: tensor for name, tensor in old.items() if "layers.1.self_attn.k_proj.weight" not in name}
        stored = case.store.put("run", 1, 11, partial)
        wrong = replace(before, version=replace(before.version, step=11), location=stored.location)
        message = f"{len(partial)} tensors of {len(old)}"
    with pytest.raises(WeightCheckFailed, match=message) as caught:
        await case.engine.load(wrong)
    assert caught.value.check == "consumed"
    assert not case.engine.usable
    with pytest.raises(EngineDead):
        await case.engine.sample(_request("late"))


@of_vllm
async def test_the_end_of_any_process_is_the_end_of_all(case: Case) -> None:
    assert case.engine.pids
    os.kill(case.engine.pids[-1], signal.SIGKILL)
    for _ in range(100):
        if not case.engine.pids:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"left after 10 s: {case.engine.pids}")
