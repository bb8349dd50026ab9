"""Every metric of a run, declared once with name, unit, help and kind. All sinks read this table.

Emitting an undeclared name raises an error, so a misspelled metric does not become a second curve. Names end with their
unit if they have one (`_s`, `_usd`, `_tokens_per_s`). A name with a slash belongs to a family: one metric with a label,
such as `reward/<part>`. Emitters normalise values; a sink never averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from rlhfless.spec.explain import closest


class Unit(StrEnum):
    """Units, named as in Prometheus."""

    NONE = ""
    SECONDS = "seconds"
    USD = "usd"
    TOKENS = "tokens"
    TOKENS_PER_SECOND = "tokens_per_second"
    RATIO = "ratio"
    """A share between 0 and 1."""
    NATS = "nats"
    """The unit of log-probabilities."""


class Kind(StrEnum):
    """Relation of a metric's values over time."""

    GAUGE = "gauge"
    """Each value stands alone."""
    COUNTER = "counter"
    """A running total that never falls."""
    HISTOGRAM = "histogram"
    """Many values per step, reported as a distribution."""


# Unit suffix of a metric name, by unit. Prometheus names use the unit's own name instead.
_ENDINGS = {Unit.SECONDS: "_s", Unit.TOKENS_PER_SECOND: "_tokens_per_s"}


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's declaration. For a family, `name` is the part before the slash and `label` names the part after it."""

    name: str
    unit: Unit
    help: str
    kind: Kind = Kind.GAUGE
    label: str | None = None

    @property
    def prometheus_name(self) -> str:
        """`rlhfless_<name>_<unit>`, without repeating the unit."""
        base = self.name.removesuffix(_ENDINGS.get(self.unit, ""))
        named = not self.unit or self.unit in base.split("_")
        return f"rlhfless_{base}" if named else f"rlhfless_{base}_{self.unit}"


class UndeclaredMetric(ValueError):
    """A value was emitted under a name missing from METRICS. The message suggests the nearest declared metric."""

    def __init__(self, name: str) -> None:
        near = closest(name, METRICS)
        nearest = f"did you mean {near!r}? If not, " if near else ""
        hint = "declare it in rlhfless/telemetry/metrics.py, or call an algorithm's own `algorithm/<name>`"
        super().__init__(f"metric {name!r} is not declared; {nearest}{hint}")


_S, _TOKENS, _RATIO, _NATS = Unit.SECONDS, Unit.TOKENS, Unit.RATIO, Unit.NATS

_DECLARED = [
    # Rewards and responses
    Metric("reward_mean", Unit.NONE, "Mean reward of the step's rollouts"),
    Metric("reward_std", Unit.NONE, "Standard deviation of the reward over the step's rollouts"),
    Metric("reward", Unit.NONE, "Mean of one part of the reward, before its weight", label="part"),
    Metric("failed_rewards", Unit.NONE, "Samples of the step with a reward that failed"),
    Metric("eval", Unit.NONE, "A figure of the evaluation on held-out prompts", label="name"),
    Metric("groups_without_signal", _RATIO, "Groups in which no two rewards differ; failed ones do not count"),
    Metric("redrawn_groups", Unit.NONE, "Groups generated to replace groups without signal"),
    Metric("deferred_groups", Unit.NONE, "Groups that the step started and deferred to later steps"),
    Metric("resumed_samples", Unit.NONE, "Samples that an earlier step deferred and this one resumes"),
    Metric("resumed_tokens", _TOKENS, "Tokens that resumed samples already had; their KV is recomputed"),
    Metric("kl_coefficient", Unit.NONE, "Weight of the KL in the reward, where it follows a target"),
    Metric("prompt_tokens_mean", _TOKENS, "Mean prompt length"),
    Metric("response_tokens", _TOKENS, "Response lengths", Kind.HISTOGRAM),
    Metric("response_tokens_mean", _TOKENS, "Mean response length"),
    Metric("response_tokens_max", _TOKENS, "Longest response"),
    Metric("truncated", _RATIO, "Responses that were cut off at the longest length"),
    Metric("turns_mean", Unit.NONE, "Mean turns of an episode"),
    Metric("calls_mean", Unit.NONE, "Mean calls of the environment in an episode"),
    Metric("invalid_calls", _RATIO, "Calls that name no tool, or have wrong arguments"),
    Metric("environment_wait_mean_s", Unit.SECONDS, "Mean time that an episode waits for its environment"),
    Metric("environment_failures", Unit.NONE, "Failures of the environment, each with a resume or restart"),
    Metric(
        "failure_chance",
        _RATIO,
        "Probability by chance of which calls have failed; below 0.00025 it is an alarm",
        label="kind",
    ),
    Metric("conversations_mean", Unit.NONE, "Mean conversations of an episode; more than 1 with sub-agents"),
    Metric("episodes", _RATIO, "Share of episodes by how they ended", label="status"),
    Metric("cached_prompt_tokens", _RATIO, "Prompt tokens whose KV came from the prefix cache"),
    Metric("prompt_tokens_computed", _TOKENS, "Prompt tokens of the step that a function computed", label="function"),
    Metric(
        "prompt_tokens_unique",
        _TOKENS,
        "Prompt tokens of a function's samples, each shared prefix once: the least that it can compute",
        label="function",
    ),
    Metric("prefix_tokens_evicted", _TOKENS, "Prompt tokens computed again: engines had given their KV away"),
    Metric("drafted_tokens", _TOKENS, "Tokens that engines drafted and verified"),
    Metric("accepted_tokens", _TOKENS, "Drafted tokens that are in responses"),
    Metric("draft_s", _S, "Time in which engines looked for drafts, of all engines"),
    Metric("verify_s", _S, "Time of passes that verified drafts, of all engines"),
    Metric("draft_acceptance", _RATIO, "Drafts that were accepted, of those at a place of a pass", label="place"),
    # Time and money
    Metric("step_s", _S, "Wall time of the step"),
    Metric("overhead_s", _S, "Wall time of the step in which no function worked"),
    Metric("recovery_s", _S, "Wall time of the step before its successful try; in no other metric"),
    Metric("generation_s", _S, "Wall time in which generation worked"),
    Metric("scoring_s", _S, "Wall time in which scoring and reward models worked"),
    Metric("reference_s", _S, "Wall time in which the reference worked"),
    Metric("teacher_s", _S, "Wall time in which teachers worked"),
    Metric("critic_s", _S, "Wall time in which the critic computed values or learned"),
    Metric("columns_s", _S, "Wall time in which functions of your own computed columns or learned"),
    Metric("learn_s", _S, "Wall time in which the learner learned or evaluated"),
    Metric("sync_s", _S, "Wall time in which weights were published and loaded"),
    Metric("checkpoint_s", _S, "Wall time in which a checkpoint was written"),
    Metric("generation_tokens_per_s", Unit.TOKENS_PER_SECOND, "Response tokens per second of generation"),
    Metric("cost_usd", Unit.USD, "Cost of all holdings so far", Kind.COUNTER),
    # The fleet
    Metric("actors", Unit.NONE, "Generation actors that took part in the step"),
    Metric("actors_wanted", Unit.NONE, "Generation actors that got work at the start of the step"),
    Metric("moved_samples", Unit.NONE, "Samples that the scaling policy moved from one actor to another"),
    Metric(
        "replayed_tokens",
        _TOKENS,
        "Tokens of migrated samples that the new engine generated again to compare",
    ),
    Metric("replayed_tokens_differ", _TOKENS, "Replayed tokens that differ from the first engine's"),
    Metric("replayed_logprob_difference_max", _NATS, "Largest difference of logprobs among equal replayed tokens"),
    Metric("planned_generation_s", _S, "Predicted wall time of generation, by the policy's plan; see generation_s"),
    Metric("policy_faults", Unit.NONE, "Failures of the scaling policy so far; see docs/faults.md", Kind.COUNTER),
    Metric("host_busy_cores", Unit.NONE, "CPU cores of the driver's machine that were busy during generation"),
    Metric("cold_starts", Unit.NONE, "Cold starts so far, of all functions", Kind.COUNTER),
    # The learner
    Metric("loss", Unit.NONE, "Loss, with KL and entropy if they are part of it"),
    Metric("policy_loss", Unit.NONE, "Policy loss, without KL and entropy"),
    Metric("preference_accuracy", _RATIO, "Pairs whose chosen response has the higher reward; ties count one half"),
    Metric("preference_margin", Unit.NONE, "Reward of the chosen response, less that of the rejected one"),
    Metric("chosen_reward", Unit.NONE, "Mean reward of chosen responses, by the model that is trained"),
    Metric("rejected_reward", Unit.NONE, "Mean reward of rejected responses, by the model that is trained"),
    Metric("learning_rate", Unit.NONE, "Learning rate, mean over the optimiser steps"),
    Metric("gradient_norm", Unit.NONE, "Norm of the gradient before it is clipped, mean over the optimiser steps"),
    Metric("gradient_norm_max", Unit.NONE, "Largest norm of the gradient of an optimiser step"),
    Metric("skipped_updates", Unit.NONE, "Optimiser steps left out because the gradient was not finite"),
    Metric("critic_learning_rate", Unit.NONE, "learning_rate of the critic"),
    Metric("critic_gradient_norm", Unit.NONE, "gradient_norm of the critic"),
    Metric("critic_gradient_norm_max", Unit.NONE, "gradient_norm_max of the critic"),
    Metric("critic_skipped_updates", Unit.NONE, "skipped_updates of the critic"),
    Metric("algorithm", Unit.NONE, "A figure that a user's own algorithm reports with its loss", label="name"),
    Metric("entropy", _NATS, "Mean entropy of the policy over response tokens"),
    Metric("ratio", Unit.NONE, "Mean probability ratio, current to old policy"),
    Metric("clipped_low", _RATIO, "Tokens without gradient because of the lower clip"),
    Metric("clipped_high", _RATIO, "Tokens without gradient because of the upper clip"),
    Metric("clipped_dual", _RATIO, "Tokens without gradient because of the dual clip"),
    Metric("bounded_low", _RATIO, "Tokens whose ratio is the lower bound of the weight instead, with its gradient"),
    Metric("bounded_high", _RATIO, "Tokens whose ratio is the upper bound of the weight instead, with its gradient"),
    Metric("router_entropy", _NATS, "Mean entropy of a router's scores, normalised, over response tokens and layers"),
    Metric("expert_load_max", Unit.NONE, "Response tokens of a layer's most used expert over those of the mean one"),
    Metric("idle_experts", _RATIO, "Experts that no response token of the step was sent to"),
    Metric("differing_routes", _RATIO, "Replayed routes (a token in a layer) that the learner would not have chosen"),
    Metric("missing_routes", _RATIO, "Response tokens without a recorded route: the learner's routers chose"),
    Metric("old_kl", _NATS, "KL divergence of the current from the old policy, per token"),
    Metric("reference_kl", _NATS, "KL divergence of the current policy from the reference, per token"),
    Metric("reverse_kl", _NATS, "KL divergence of the student from a teacher, per token", label="teacher"),
    Metric(
        "teacher_agreement",
        _RATIO,
        "Overlap of the distributions of student and teacher: 1 if they are equal",
        label="teacher",
    ),
    Metric("teacher_cross_entropy", _NATS, "Mean of minus the teacher's logprob of a token", label="teacher"),
    Metric("teacher_entropy", _NATS, "Entropy of a teacher with a path, where it computed a token", label="teacher"),
    Metric("importance_weight", Unit.NONE, "Mean importance weight of a token, old policy to engine, unbounded"),
    Metric("importance_weight_max", Unit.NONE, "Largest importance weight of a token, unbounded"),
    Metric("importance_outside", _RATIO, "Tokens whose importance weight is truncated or masked"),
    Metric("rejected", _RATIO, "Tokens that the off-policy rejection leaves out"),
    Metric("rollout_kl", _NATS, "KL divergence of the engine's from the old policy, per token"),
    Metric("sequence_log_ratio_max", _NATS, "Largest |log ratio| of a sequence, old policy to engine"),
    Metric("geometric_log_ratio_max", _NATS, "Largest |mean log ratio| of a sequence's tokens, old policy to engine"),
    Metric("value_loss", Unit.NONE, "Loss of the critic"),
    Metric("value_clipped", _RATIO, "Tokens whose value the clip keeps from moving further"),
    Metric("explained_variance", Unit.NONE, "Variance of the returns that the critic explains: 1 is all of it"),
    Metric("rollout_logprob_difference", _NATS, "Mean |learner - engine| logprob of the sampled tokens"),
    Metric("staleness_mean", Unit.NONE, "Versions that a token's weights were behind the learner's, mean"),
    Metric("staleness_max", Unit.NONE, "Versions that a token's weights were behind the learner's, at most"),
    Metric(
        "tokens_by_staleness",
        _RATIO,
        "Tokens by how many versions their weights lag",
        label="versions",
    ),
    Metric("importance_weight_by_staleness", Unit.NONE, "importance_weight of these tokens", label="versions"),
    Metric("rollout_kl_by_staleness", _NATS, "rollout_kl of these tokens", label="versions"),
    Metric("clipped_by_staleness", _RATIO, "clipped_low and clipped_high of these tokens", label="versions"),
    Metric("rollout_logprob_difference_max", _NATS, "Largest |learner - engine| logprob"),
]

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _DECLARED})
"""All metrics by name."""


def resolve(name: str) -> tuple[Metric, str | None]:
    """Return a name's declaration, and the label's value if it belongs to a family.

    Raises UndeclaredMetric.
    """
    family, slash, label = name.partition("/")
    metric = METRICS.get(family)
    if metric is None or (metric.label is None) == bool(slash) or bool(slash) != bool(label):
        raise UndeclaredMetric(name)
    return metric, label or None
