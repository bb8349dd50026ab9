"""A judge with a model of its own, whose engine is played by the test."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.builders import samples_of
from rlhfless.functions.generation.engine import EngineDead, EngineError, Sampled, SampleRequest
from rlhfless.functions.scoring.judge import EngineAnswers, engine_settings
from rlhfless.prepare.byte_tokenizer import END, byte_tokenizer
from rlhfless.records import FinishReason, FunctionRole
from rlhfless.rewards import Rewards
from rlhfless.scaling.function_specs import kinds_of
from rlhfless.spec import JudgeSpec, RunSpec, ScoringSpec


class PlayedEngine:
    """Answers by `answer`; keeps the requests in `seen`."""

    def __init__(self, answer: Callable[[SampleRequest], Sampled]) -> None:
        self._answer = answer
        self.seen: list[SampleRequest] = []

    async def sample(self, request: SampleRequest) -> Sampled:
        self.seen.append(request)
        await asyncio.sleep(0)
        return self._answer(request)


def says(text: str, **fields: Any) -> Callable[[SampleRequest], Sampled]:
    end = FinishReason.STOP
    return lambda request: Sampled(request.request_id, (1, 2), (-0.1, -0.2), end, (), 3, text, **fields)


@pytest.fixture
def judge(tmp_path: Path) -> JudgeSpec:
    byte_tokenizer().save_pretrained(tmp_path)
    return JudgeSpec(type="judge", name="grader", path=str(tmp_path), template="Rate it.\n{response}")


async def parts(judge: JudgeSpec, engine: Any, *responses: str, **scoring: Any) -> list[Any]:
    answers = EngineAnswers(judge, engine)
    rewards = Rewards((judge,), ScoringSpec(**scoring), {"grader": answers})
    return [
        each.parts.get("grader", each.failures.get("grader")) for each in await rewards.score(samples_of(*responses))
    ]


async def test_the_engine_reads_the_question_by_its_chat_template(judge: JudgeSpec) -> None:
    engine = PlayedEngine(says(" 7\n"))
    assert await parts(judge, engine, "four", "five", "four") == [7.0, 7.0, 7.0]
    assert len(engine.seen) == 2, "equal questions are asked once"
    request = engine.seen[0]
    text = byte_tokenizer().decode(request.token_ids)
    assert text.startswith("<|im_start|>system\nYou are a fair and strict judge.")
    assert "<|im_start|>user\nRate it.\n<<<response " in text
    assert text.endswith(f"{END}\n<|im_start|>assistant\n")
    assert (request.max_tokens, request.temperature, request.top_logprobs) == (1024, 0.0, 0)
    assert engine.seen[0].seed != engine.seen[1].seed


async def test_a_verdict_by_logprobs_reads_the_first_token_of_the_model_itself(judge: JudgeSpec) -> None:
    yes_no = judge.model_copy(update={"verdict": "yes_no", "temperature": 0.3})
    engine = PlayedEngine(says("yes", first=((" Yes", math.log(0.6)), ("no", math.log(0.2)), ("x", math.log(0.1)))))
    assert await parts(yes_no, engine, "four") == [pytest.approx(0.75)]
    (request,) = engine.seen
    assert (request.max_tokens, request.temperature, request.top_logprobs) == (1, 1.0, 20)


async def test_the_body_sets_how_the_engine_samples(judge: JudgeSpec) -> None:
    body = {"temperature": None, "max_tokens": None, "top_p": 0.5, "top_k": 3, "stop": "\n", "seed": 5}
    engine = PlayedEngine(says("3"))
    assert await parts(judge.model_copy(update={"body": body}), engine, "four") == [3.0]
    (request,) = engine.seen
    assert (request.temperature, request.top_p, request.top_k, request.stop, request.seed) == (1.0, 0.5, 3, ("\n",), 5)
    assert request.max_tokens > 1024


async def test_what_the_engine_refuses_is_a_failure_and_no_reward(judge: JudgeSpec) -> None:
    def refuse(_: SampleRequest) -> Sampled:
        raise EngineError("Traceback ...\nValueError: the prompt is too long\n")

    (cause,) = await parts(judge, PlayedEngine(refuse), "four")
    assert cause == f"{judge.path}: ValueError: the prompt is too long"
    (cause,) = await parts(judge, PlayedEngine(says("good")), "four")
    assert cause == f"{judge.path}: answered 'good', which is no number"


async def test_a_lost_engine_is_no_failure_of_a_sample(judge: JudgeSpec) -> None:
    def die(_: SampleRequest) -> Sampled:
        raise EngineDead("killed")

    with pytest.raises(EngineDead):
        await parts(judge, PlayedEngine(die), "four", "five")


async def test_an_engine_that_takes_too_long_fails_the_samples(judge: JudgeSpec) -> None:
    class Slow:
        async def sample(self, _: SampleRequest) -> Sampled:
            await asyncio.sleep(60)
            raise AssertionError

    (cause,) = await parts(judge, Slow(), "four", timeout_s=0.05)
    assert cause == "not scored within scoring.timeout_s (0.05 s)"


async def test_the_work_is_counted_once(judge: JudgeSpec) -> None:
    engine = PlayedEngine(says("7"))
    answers = EngineAnswers(judge, engine)  # type: ignore[arg-type]
    rewards = Rewards((judge,), ScoringSpec(), {"grader": answers})
    await rewards.score(samples_of("four", "five"))
    usage = answers.take_usage()
    assert usage.input_tokens == sum(len(each.token_ids) for each in engine.seen)
    assert (usage.output_tokens, usage.cached_tokens) == (4, 6)
    assert answers.take_usage().input_tokens == 0


def run_of(*rewards: Any, **parts: Any) -> RunSpec:
    return RunSpec.model_validate({"model": {"path": "x"}, "prompts": {"path": "p"}, "rewards": rewards} | parts)


JUDGE = {"type": "judge", "name": "grader", "path": "y", "template": "{response}", "tensor_parallel_size": 2}


def test_a_judge_with_a_path_is_a_function_that_scores() -> None:
    run = run_of(
        {"type": "exact_match"}, JUDGE, {"type": "judge", "url": "http://j/v1", "model": "m", "template": "{response}"}
    )
    kinds = {kind.name: kind for kind in kinds_of(run)}
    assert [*kinds] == ["generation", "scoring", "learner", "judge_grader"]
    kind = kinds["judge_grader"]
    assert (kind.role, kind.settings) == (FunctionRole.SCORES, run.rewards[1])
    assert kind.bounds(run) == kinds["scoring"].bounds(run)
    wanted = kind.wanted(run)
    assert wanted is not None
    assert (wanted.ranks, wanted.ranks_key, wanted.one_node) == (2, "rewards.1.tensor_parallel_size", True)
    again = RunSpec.model_validate(json.loads(run.model_dump_json()))
    assert again.judges == run.judges


def test_the_engine_has_the_judges_settings() -> None:
    run = run_of(JUDGE | {"kv_cache_gib": 2, "max_context_tokens": 512}, placement={"turns": True})
    settings = engine_settings(run.judges[0], run, "cuda", "folder")
    assert (settings.model, settings.tokenizer, settings.dtype) == ("y", "y", "bfloat16")
    assert (settings.max_model_len, settings.kv_bytes, settings.sleeps) == (512, 2 << 30, True)
    assert settings.engine.devices_per_actor == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"url": "http://j/v1"}, "both url and path"),
        ({"path": None}, "neither url nor path"),
        ({"model": "m"}, "`model` would not be used by a judge with a `path`"),
        ({"retries": 1}, "`retries` would not be used by a judge with a `path`"),
        ({"path": None, "url": "http://j/v1"}, "`tensor_parallel_size` would not be used by a judge with a `url`"),
        ({"path": None, "url": "http://j/v1", "tensor_parallel_size": 1}, "`model` is missing"),
        ({"name": "My judge"}, "names no function"),
        ({"body": {"response_format": {}}}, "a judge with a `path` has no 'response_format'"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_of(JUDGE | changes)
