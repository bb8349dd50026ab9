"""A learner whose layers are compiled takes the same step."""

from __future__ import annotations

import pytest
import torch

from rlhfless.algorithms.passes import Passes
from rlhfless.functions import policy_loading
from rlhfless.functions.policy_loading import compile_layers, restore_layers
from rlhfless.selftest import rank_work
from rlhfless.spec import AdamWSpec


@pytest.mark.parametrize(
    ("backend", "shared", "evaluates"),
    [("eager", False, False), pytest.param("aot_eager", True, True, marks=pytest.mark.long)],
)
def test_a_step_of_compiled_layers_is_that_of_plain_ones(
    learner, batch, monkeypatch: pytest.MonkeyPatch, backend: str, shared: bool, evaluates: bool
) -> None:
    """With FSDP and activation checkpointing around the layers, and micro-batches of several widths. These backends run
    the captured graphs with torch's own kernels, and need no compiler."""
    monkeypatch.setattr(policy_loading, "BACKEND", backend)
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        changes = {"compile": compiled, "gradient_checkpointing": True, "share_prefixes": shared}
        with learner(optimizer=AdamWSpec(learning_rate=0.1, eps=1.0), micro_batch_tokens=64, **changes) as rank:
            assert compiled == any("forward" in vars(layer) for layer in policy_loading.layers_of(rank._model))
            given = batch.with_columns(old_logprobs=rank.evaluate(batch)) if evaluates else batch
            results.append((rank.learn(given, Passes(2) if evaluates else Passes()), rank.weights()))
            if compiled:
                restore_layers(rank._model)
    (plain, weights), (ours, others) = results
    assert ours["loss"] == pytest.approx(plain["loss"], abs=1e-6)
    assert ours["gradient_norm"] == pytest.approx(plain["gradient_norm"], rel=1e-4)
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, atol=1e-5, rtol=0, msg=name)


@pytest.mark.long
def test_the_self_test_times_steps_with_plain_and_with_compiled_layers(learner, batch, monkeypatch) -> None:
    monkeypatch.setattr(policy_loading, "BACKEND", "eager")
    torch._dynamo.reset()
    with learner(micro_batch_tokens=64, share_prefixes=False) as rank:
        found = rank_work.compiled(rank, batch)
        assert not any("forward" in vars(layer) for layer in policy_loading.layers_of(rank._model))
    assert found["difference_nats"] < 1e-5
    assert min(found[name] for name in ("plain_s", "compiled_s", "first_s")) > 0


def test_layers_are_plain_again_after_restore(tiny_model) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    compile_layers(model)
    assert all("forward" in vars(layer) for layer in model.model.layers)
    restore_layers(model)
    assert not any("forward" in vars(layer) for layer in model.model.layers)
