"""Keys and values that were removed from specs, each with a replacement.

A spelling is a dotted key (`schedule.streaming`), with `*` for the index of a list item (`rewards.*.weight`), or a key
and a value (`algorithm.type=remax`). A section's short form (`algorithm: remax`) counts as its `type`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from rlhfless.spec.document import Path, dotted, walk
from rlhfless.spec.errors import Problem

_SIMULATED = (
    "Use `cost_aware` or `static`; `rlhfless simulate` compares policies of other systems, named in `policies` of a "
    "scenario"
)

_MOMENTS = (
    "Leave it out: AdamW's moments are float32. If they do not fit, set `learner.offload: true` (or `critic.offload`), "
    "or more `learner.ranks`"
)

_SANDBOX = (
    "Leave it out: a test of `type: code` has a folder of 64 MiB and 1,024 files, files of up to 16 MiB, 64 open files "
    "and 256 KiB of output; `memory_mib`, `cpu_s` and `timeout_s` stay"
)

_ONE_POOL = "Leave it out: a simulated run has one generation pool; `rlhfless plan` says whether prefill actors pay"

_NO_AUXILIARY_LOSS = (
    "Leave it out: an auxiliary loss that balances experts competes with the reward, and made RL of mixtures of "
    "experts worse elsewhere (docs/moe.md). The metrics `expert_load_max` and `idle_experts` show the balance"
)

FOREIGN: Mapping[str, str] = MappingProxyType(
    {
        f"{section}{name}": _NO_AUXILIARY_LOSS
        for section in ("", "model.", "learner.", "algorithm.", "optimizer.")
        for name in ("router_aux_loss_coef", "aux_loss_coef", "aux_loss_alpha", "moe_aux_loss_coeff")
    }
)
"""Keys of other tools that have no counterpart, with the reason."""

REMOVED: Mapping[str, str] = MappingProxyType(
    {
        **FOREIGN,
        "algorithm.type=remax": (
            "Use `rloo`, whose baseline is the mean reward of the prompt's other samples, or `grpo`; both need "
            "samples_per_prompt of 2 or more, and no greedy response"
        ),
        "optimizer.moment_bits": _MOMENTS,
        "critic.optimizer.moment_bits": _MOMENTS,
        "scaling.policy.type=queue_reactive_ray_serve": _SIMULATED,
        "scaling.policy.type=queue_reactive_knative": _SIMULATED,
        "scaling.policy.type=queue_reactive_keda": _SIMULATED,
        "scaling.policy.type=rlhfuse_tail": _SIMULATED,
        "scaling.policy.type=rlhfless_published": _SIMULATED,
        "placement.learner_elsewhere": (
            "Give the learner one kind of device with `placement.learner_kind` and `placement.learner_devices`; pause "
            "and resume the run to change them"
        ),
        "learner.min_ranks": (
            "Use `placement.devices: {min: 2, max: 8}`, with your own sizes: the whole run goes on with fewer devices "
            "after a loss, and grows again when devices are free"
        ),
        "generation.engine.kv_connector": (
            "Use `scaling.prefill.kv_connector` with prefill actors; without these leave it out: each actor computes "
            "its shared prefixes, and samples that migrate recompute their KV"
        ),
        "recovery.beat_s": "Use its new name, `recovery.heartbeat_s`",
        "weights.rollout_difference_limit": (
            "Leave it out: digest, read-back and probe check each load; the metric `rollout_logprob_difference` stays"
        ),
        "generation.quantization=int8": "Use `fp8`, which vLLM quantizes as it loads, or `off`",
        "optimizer.type": "Leave it out: the optimizer is AdamW",
        "critic.optimizer.type": "Leave it out: the optimizer is AdamW",
        "logging.jsonl": "Leave it out: metrics.jsonl is always written",
        "rewards.*.file_mib": _SANDBOX,
        "rewards.*.folder_mib": _SANDBOX,
        "rewards.*.folder_files": _SANDBOX,
        "rewards.*.open_files": _SANDBOX,
        "rewards.*.output_kib": _SANDBOX,
        "schedule.streaming": "Use `schedule: async` to overlap generation and learning, or `sync` without this key",
        "schedule.type=tail_batching": "Use `schedule: partial`, which resumes long responses in later steps",
        "schedule.type=auto": (
            "Name one: `sync`, or `async` or `one_step_off`, which overlap generation and learning; `rlhfless plan` "
            "shows their times and costs side by side"
        ),
    }
)
"""Spellings removed from a run's spec, with a hint for each."""

REMOVED_FROM_SCENARIOS: Mapping[str, str] = MappingProxyType(
    {key: hint for key, hint in REMOVED.items() if key.startswith(("schedule.", "placement."))}
    | {
        "policies.*.placement.learner_elsewhere": REMOVED["placement.learner_elsewhere"],
        "learner.min_devices": "Leave it out: a simulated learner keeps its devices",
        "engine.latency.type=engine": (
            "Use `kernels` or `roofline`, or `fitted` with a file of `rlhfless simulate --calibrate`"
        ),
        "beat_s": "Use its new name, `heartbeat_s`",
        "placement.prefill_actors": _ONE_POOL,
        "policies.*.placement.prefill_actors": _ONE_POOL,
        "cluster.kv_bytes_per_s": _ONE_POOL,
    }
)


def removed_problems(data: Any, removed: Mapping[str, str]) -> Iterator[tuple[Path, Problem]]:
    """Yield a problem for each removed spelling in plain `data`, with its path. The problem has no origin yet."""
    for path, value in walk(data):
        key = dotted(tuple("*" if isinstance(part, int) else part for part in path))
        with_value = (f"{key}={value}", f"{key}.type={value}") if isinstance(value, str) else ()
        for spelling in (key, *with_value):
            if hint := removed.get(spelling):
                what = "was removed" if spelling == key else f"{value!r} was removed"
                what = "is not supported" if key in FOREIGN else what
                yield path, Problem(dotted(path), what, hint)


NAMES: Mapping[str, str] = MappingProxyType(
    {
        "num_generations": "samples_per_prompt",
        "rollout_n": "samples_per_prompt",
        "max_completion_length": "generation.max_tokens",
        "max_new_tokens": "generation.max_tokens",
        "max_response_length": "generation.max_tokens",
        "response_length": "generation.max_tokens",
        "max_steps": "steps",
        "total_training_steps": "steps",
        "train_batch_size": "prompts_per_step",
        "per_device_train_batch_size": "prompts_per_step",
        "lr": "optimizer.learning_rate",
        "lr_scheduler_type": "optimizer.rate_schedule",
        "eval_steps": "evaluation.every_steps",
        "test_freq": "evaluation.every_steps",
        "save_steps": "checkpoint.every_steps",
        "save_freq": "checkpoint.every_steps",
        "reward_funcs": "rewards",
        "reward_function": "rewards",
        "model_name_or_path": "model.path",
        "dataset_name": "prompts.path",
        "train_dataset": "prompts.path",
        "train_files": "prompts.path",
        "eval_dataset": "prompts.held_out",
        "val_files": "prompts.held_out",
        "output_dir": "output",
        "kl_coef": "algorithm.kl.coefficient",
        "kl_loss_coef": "algorithm.kl.coefficient",
        "torch_dtype": "model.dtype",
    }
)
"""Dotted spec keys of type `rlhf` by their names in other tools. Only settings with nearly the same meaning are
listed."""
