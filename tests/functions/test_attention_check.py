"""Attention kernels that are wrong, and parts of a model that fused attention ignores, are found at load."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BloomConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    Mamba2Config,
    MambaConfig,
    PreTrainedConfig,
    VaultGemmaConfig,
)

import fakes.fake_varlen  # noqa: F401  # registers the stand-in
from fakes.tiny_learner import make_pairs, make_rank, make_supervised, token_logprobs
from fakes.tiny_models import FAMILIES, SHAPE, save
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.supervised import pack_examples
from rlhfless.functions import attention_kernels, policy_loading, prefix_attention
from rlhfless.functions.attention_check import ignored_by_sdpa, packed_difference, padded_difference
from rlhfless.functions.attention_kernels import packed_rows_take, uses_varlen
from rlhfless.functions.policy import (
    CHECK_TOLERANCE,
    PolicyNetwork,
    logprob_outputs,
    response_logprobs,
    response_outputs,
)
from rlhfless.functions.policy_loading import load_policy
from rlhfless.functions.scoring.reward_model import RewardModel
from rlhfless.prefixes.packing import NEVER
from rlhfless.records import FinishReason
from rlhfless.rewards import RewardSample
from rlhfless.scaling.latency.attention import attention_form
from rlhfless.spec import ModelSpec, RewardModelSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", CHECK_TOLERANCE)
def test_gradients_are_those_of_plain_attention(dtype: torch.dtype) -> None:
    assert packed_difference(CPU, dtype, varlen=False, head=96) <= CHECK_TOLERANCE[dtype]
    assert packed_difference(CPU, dtype, varlen=True, head=96) <= CHECK_TOLERANCE[dtype]
    assert padded_difference(CPU, dtype) <= CHECK_TOLERANCE[dtype]


def test_a_difference_that_is_no_number_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    right = prefix_attention.attend_varlen_backward

    def backward(gradient: torch.Tensor, query: torch.Tensor, *others: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        gradients = right(gradient, query, *others, **options)
        return gradients if query.shape[2] > 64 else tuple(each * torch.nan for each in gradients)

    monkeypatch.setattr(prefix_attention, "attend_varlen_backward", backward)
    assert not packed_difference(CPU, torch.float32, varlen=True) <= 1e9


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
@pytest.mark.parametrize("on_gpus", [False, True])
def test_rows_are_padded_where_the_backward_pass_is_wrong(
    wrong: float, on_gpus: bool, tiny_model: str, batch: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Outputs are right, so a check of them alone does not find it."""
    name = "attend_varlen_backward" if on_gpus else "attend_backward"
    right = getattr(attention_kernels, name)

    def backward(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        query, key, value = right(*tensors, **options)
        return query, key, value * wrong

    monkeypatch.setattr(prefix_attention, name, backward)
    assert_padded(tiny_model, batch, monkeypatch, caplog, "gradients that differ by", on_gpus=on_gpus)


def refused(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


def zeros(query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    return torch.zeros_like(query), torch.zeros(query.shape[1::-1])


@pytest.mark.parametrize(("kernel", "reason"), [(refused, "only supports Ampere"), (zeros, "outputs or gradients")])
def test_rows_are_padded_where_the_kernel_does_not_work(monkeypatch, tiny_model, batch, caplog, kernel, reason):
    monkeypatch.setattr(prefix_attention, "attend_varlen", kernel)
    assert_padded(tiny_model, batch, monkeypatch, caplog, reason, on_gpus=True)


def test_rows_are_padded_in_float32_on_gpus(monkeypatch, tiny_model, batch, caplog):
    monkeypatch.setattr(policy_loading, "packed_rows_take", lambda *_: False)
    assert_padded(tiny_model, batch, monkeypatch, caplog, "takes bfloat16 and float16", on_gpus=True)


def assert_padded(path: str, batch: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any, reason: str, *, on_gpus: bool):
    monkeypatch.setattr(policy_loading, "uses_varlen", lambda _: on_gpus)
    with caplog.at_level(logging.WARNING):
        loaded = load_policy(ModelSpec(path=path), parameter_dtype="float32", compute_dtype="float32", device=CPU)
    assert (loaded.packing, loaded.varlen) == (NEVER, False)
    assert reason in caplog.text
    assert loaded.model.config._attn_implementation == "sdpa"
    assert len(response_logprobs(loaded, batch, 1.0).logprobs) == batch.response_mask.sum()


def test_it_is_for_gpus_and_16_bits():
    gpu = torch.device("cuda", 0)
    assert (uses_varlen(gpu), uses_varlen(CPU)) == (True, False)
    assert packed_rows_take(gpu, torch.bfloat16)
    assert not packed_rows_take(gpu, torch.float32)
    assert packed_rows_take(CPU, torch.float32)


GEMMA2 = {**SHAPE, "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": None, "sliding_window": 6}
FORMS: dict[str, Callable[[], PreTrainedConfig]] = {
    "cap 1": lambda: Gemma2Config(**GEMMA2, attn_logit_softcapping=1.0),
    "cap 50": lambda: Gemma2Config(**GEMMA2, attn_logit_softcapping=50.0),
    "cap 50, weights near 0": lambda: Gemma2Config(
        **GEMMA2 | {"initializer_range": 0.001}, attn_logit_softcapping=50.0
    ),
    "cap 30, final cap": lambda: Gemma2Config(
        **GEMMA2 | {"final_logit_softcapping": 2.0}, attn_logit_softcapping=30.0
    ),
    "vaultgemma": lambda: VaultGemmaConfig(**GEMMA2, attn_logit_softcapping=2.0),
    "sinks": lambda: GptOssConfig(
        **SHAPE, head_dim=8, sliding_window=6, num_local_experts=4, num_experts_per_tok=2
    ),
}  # fmt: skip
FUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma2 without a cap": lambda: Gemma2Config(**GEMMA2, attn_logit_softcapping=None),
    "multi-head latent attention": lambda: DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=4,
    ),
    "chunks": lambda: Llama4TextConfig(
        **SHAPE, head_dim=8, intermediate_size_mlp=48, attention_chunk_size=6, num_local_experts=2,
        no_rope_layers=[1, 0],
    ),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=6),
    **{name: (lambda name=name: FAMILIES[name]) for name in ("llama", "qwen2", "qwen2_sliding", "granite", "cohere")},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loaded(path: str, **options: Any) -> PolicyNetwork:
    return load_policy(ModelSpec(path=path), parameter_dtype="float32", compute_dtype="float32", **options)


def saved(config: PreTrainedConfig, folder: Path) -> str:
    path = save(config, folder)
    if isinstance(config, GptOssConfig):  # its sinks are 0 or random when it is made; here they count
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.copy_(torch.linspace(-1, 3, 4))
        model.save_pretrained(path)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_logprobs_and_gradients_are_those_of_eager(form: str, shared_batch: PackedBatch, tmp_path: Path) -> None:
    path = saved(FORMS[form](), tmp_path)
    policy = loaded(path)
    assert policy.model.config._attn_implementation == "eager"
    assert policy.packing.pays_below == 0, "prefixes are shared by a kernel that has no caps and no sinks"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    batch, mask = shared_batch, shared_batch.response_mask
    logprobs, *_ = response_outputs(policy, batch, logprob_outputs(policy, 1.0))
    expected = []
    for start, length in zip(batch.starts, batch.lengths, strict=True):
        tokens = torch.tensor(batch.tokens[start : start + length])
        everything = model(input_ids=tokens[None]).logits[0].log_softmax(-1)[:-1]
        chosen = everything.gather(1, tokens[1:, None]).squeeze(1)
        expected.append(chosen[torch.from_numpy(mask[start + 1 : start + length])])
    theirs = torch.cat(expected)
    torch.testing.assert_close(logprobs, theirs, atol=1e-5, rtol=0)
    logprobs.mean().backward()
    theirs.mean().backward()
    ours = dict(policy.model.named_parameters())
    for name, parameter in model.named_parameters():
        gradient, other = ours[name].grad, parameter.grad
        assert (gradient is None) == (other is None), name
        if other is not None:
            torch.testing.assert_close(gradient, other, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("form", FUSED)
def test_models_that_the_fused_attention_computes_keep_it(form: str, tmp_path: Path) -> None:
    """Prefixes may be shared where they can: a model of latent attention ended with torch's error there."""
    policy = loaded(save(FUSED[form](), tmp_path))
    assert policy.model.config._attn_implementation != "eager"
    assert (policy.packing.pays_below > 0) == (form in ("llama", "qwen2", "granite", "cohere"))


@pytest.mark.parametrize(
    ("config", "warned"),
    [
        (MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=2), False),
        (
            Mamba2Config(
                vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=2, num_heads=4, head_dim=8, n_groups=1
            ),
            False,
        ),
        (FORMS["cap 1"](), True),
    ],
    ids=["mamba", "mamba2", "gemma2"],
)
def test_a_model_without_attention_gets_no_warning_of_it(
    config: PreTrainedConfig, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded(save(config, tmp_path), share_prefixes=False)
    assert ("eager attention" in caplog.text) == warned


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("cap 1", "softcap of Gemma2Attention (outputs differ by"),
        ("cap 50", "softcap of Gemma2Attention (outputs differ by"),
        ("cap 50, weights near 0", "softcap of Gemma2Attention (outputs differ by"),
        ("vaultgemma", "softcap of VaultGemmaAttention (outputs differ by"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_ignored_is_named_whatever_the_weights_are(form: str, words: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FORMS[form](), attn_implementation="sdpa").to(dtype)
    assert words in ignored_by_sdpa(model, lambda: model(input_ids=torch.arange(8)[None]))
    assert model.config._attn_implementation == "sdpa"


def test_nothing_is_said_of_a_plain_model() -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"], attn_implementation="sdpa")
    assert ignored_by_sdpa(model, lambda: model(input_ids=torch.arange(8)[None])) == ""


@pytest.mark.parametrize("form", ["cap 1", "vaultgemma"])
def test_bfloat16_is_no_excuse(form: str, batch: PackedBatch, tmp_path: Path) -> None:
    """It passed, with logprobs up to .93 apart."""
    path = save(FORMS[form](), tmp_path)
    policy = load_policy(ModelSpec(path=path), parameter_dtype="bfloat16", compute_dtype="bfloat16")
    assert policy.model.config._attn_implementation == "eager"
    exact = token_logprobs(loaded(path), batch, 1.0, 200)
    assert np.abs(token_logprobs(policy, batch, 1.0, 200) - exact).max() < 0.3


@pytest.mark.parametrize("form", ["cap 1", "sinks"])
def test_a_learner_trains_with_the_form(form: str, batch: PackedBatch, tmp_path: Path) -> None:
    """Split over a rank: the same choice, by the same numbers."""
    path = saved(FORMS[form](), tmp_path / "model")
    rank = make_rank(path, tmp_path / "rendezvous", temperature=1.0)
    try:
        assert rank._policy.model.config._attn_implementation == "eager"
        np.testing.assert_allclose(rank.evaluate(batch), token_logprobs(loaded(path), batch, 1.0, 200), atol=1e-5)
    finally:
        rank.close()


def test_the_loss_of_sft_is_that_of_eager(tmp_path: Path) -> None:
    """It was 6.186627 where eager says 6.153143."""
    path = save(FORMS["cap 1"](), tmp_path / "model")
    batch = pack_examples(make_pairs())
    rank = make_supervised(path, tmp_path / "rendezvous", run_type="sft")
    try:
        loss = -float(rank.evaluate(batch)[batch.response_mask].mean())
    finally:
        rank.close()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    expected = []
    for start, length in zip(batch.starts, batch.lengths, strict=True):
        tokens, learned = (
            torch.tensor(batch.tokens[start : start + length]),
            batch.response_mask[start : start + length],
        )
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
        expected += losses[torch.from_numpy(learned[1:])].tolist()
    assert loss == pytest.approx(np.mean(expected), abs=1e-5)


@pytest.mark.parametrize("cap", [1.0, None])
def test_a_reward_model_scores_with_the_cap(cap: float | None, tmp_path: Path, tiny_model: str) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(**GEMMA2, attn_logit_softcapping=cap, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    model = RewardModel(RewardModelSpec(type="reward_model", path=str(tmp_path), dtype="float32"), threads=1)
    assert model._model.config._attn_implementation == ("sdpa" if cap is None else "eager")
    eager = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager").eval()
    eager.config.pad_token_id = None
    sequence = [5, 9, 3, 22, 17, 8, 30, 2, 11]
    model._tokens = lambda _: sequence  # type: ignore[method-assign]
    with torch.inference_mode():
        expected = float(eager(input_ids=torch.tensor([sequence])).logits[0, 0])
    assert model.score([RewardSample("", "", 1, FinishReason.STOP)]) == pytest.approx([expected], abs=1e-5)


@pytest.mark.parametrize("form", [*FORMS, *FUSED])
def test_a_configuration_tells_which_attention_a_load_will_choose(form: str, tmp_path: Path) -> None:
    config = (FORMS | FUSED)[form]()
    policy = loaded(save(config, tmp_path), share_prefixes=False)
    chosen = "eager" if policy.model.config._attn_implementation == "eager" else "fused"
    assert attention_form(config.to_dict())[0] == chosen


@pytest.mark.parametrize(
    ("config", "form", "words"),
    [
        (Gemma2Config(**GEMMA2, attn_logit_softcapping=50.0).to_dict(), "eager", "(attn_logit_softcapping: 50)"),
        (GptOssConfig().to_dict(), "eager", "no other for model_type 'gpt_oss'"),
        (BloomConfig().to_dict(), "eager", "no other for model_type 'bloom'"),
        (MambaConfig().to_dict(), "fused", ""),
        ({"model_type": "gemma3_text", "num_attention_heads": 4}, "fused", ""),
        ({"model_type": "own", "num_attention_heads": 4}, "unknown", "code of model_type 'own'"),
        ({"model_type": "llama", "num_attention_heads": 4, "auto_map": {}}, "unknown", "not transformers' own"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_the_reason_is_named_without_weights(config: dict[str, Any], form: str, words: str) -> None:
    found, reason = attention_form(config)
    assert found == form
    assert words in reason
    assert bool(words) == bool(reason)
