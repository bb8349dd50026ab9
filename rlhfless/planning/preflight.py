"""Preflight checks: everything that can be checked before a start, reporting all problems at once.

Not checked here, because only the cluster knows: the devices of a joined Ray cluster, and whether the run fits into
their memory.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from rlhfless.planning.host_memory import Needed, room_at, room_problems, store_base
from rlhfless.planning.inputs import host_memory_bytes
from rlhfless.planning.memory_plan import is_set
from rlhfless.planning.resolve import ResolvedRun, resolve
from rlhfless.planning.sizes import fitting_sizes
from rlhfless.prepare.data_rows import read_rows
from rlhfless.prepare.environment_check import environment_problems
from rlhfless.prepare.examples import load_sets
from rlhfless.prepare.faults import SkippedRows
from rlhfless.prepare.machine import capacity_problems, capacity_warnings, checkpoint_problems, learning_rate_warnings
from rlhfless.prepare.model import PolicyModel, TokenizerInfo, attention_warnings, critic_problems, load_policy
from rlhfless.prepare.model_weights import weight_problems
from rlhfless.prepare.prompts import PromptSets
from rlhfless.prepare.rewards import reward_problems, reward_warnings, trial_calls
from rlhfless.prepare.teachers import teacher_faults
from rlhfless.records import Prompt
from rlhfless.records.rollouts import Example
from rlhfless.scaling.latency.devices import load_devices
from rlhfless.scaling.latency.shape import DTYPE_BYTES, ModelShape
from rlhfless.scaling.memory import published_bytes, stored_versions
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.scaling.prices import OWN_DEVICES, load_price_book
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import nearest
from rlhfless.telemetry.metrics import METRICS
from rlhfless.telemetry.trackers import missing_packages
from rlhfless.util.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prepared:
    """The checked inputs from which a run starts."""

    spec: RunSpec
    """The spec that runs; with a joined cluster, the spec as given until its devices are known."""
    resolved: ResolvedRun | None
    """The run on its devices; None until the devices of a joined cluster are known."""
    tokenizer: TokenizerInfo
    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    max_model_len: int
    """Longest sequence the engine must hold, in tokens: at most the longest prompt + max_tokens."""
    shape: ModelShape | None
    """The policy's sizes, for a first estimate of its speed; None if its config does not have them."""
    warnings: tuple[str, ...]
    skipped: tuple[SkippedRows, ...] = ()
    """See PromptSets."""
    sizes: tuple[int, ...] = ()
    """Numbers of devices on which an elastic run fits, fewest first; empty for a run of one size, and until the devices
    of a joined cluster are known."""

    def on(self, resolved: ResolvedRun) -> Prepared:
        """Return the inputs of a run whose devices are known now."""
        shape = self.shape
        if shape is not None:
            shape = replace(shape, weight_bytes=DTYPE_BYTES[resolved.spec.model.dtype])
        return replace(self, spec=resolved.spec, resolved=resolved, shape=shape)


def preflight(spec: RunSpec) -> Prepared:
    """Check a spec against its files, models, rewards and devices, and resolve it for the devices of this machine.

    A spec that joins a cluster is resolved once that is reached. Raises InputError with all problems.
    """
    with _without_collector():
        return _preflight(spec)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Disable Python's cycle collector.

    It would repeatedly scan the objects created by importing torch and transformers, a fifth of the time of `rlhfless
    validate`, and free nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _preflight(spec: RunSpec) -> Prepared:
    problems: list[Problem] = []
    policy = _try(lambda: load_policy(spec.model), problems)
    if policy:
        prompts = _try(lambda: load_sets(spec, policy), problems)
    else:
        prompts = None
        for field, path, split in spec.data.files:
            _try(partial(read_rows, field, path, split, spec.sizes), problems)
    everything = [*prompts.train, *prompts.held_out] if prompts else []
    resolved = _resolved(spec, _longest(spec, everything, policy) if policy and prompts else None)
    sizes = None if resolved is None else _try(partial(_sizes, spec, resolved), problems)
    spec = spec if resolved is None else resolved.spec
    problems += weight_problems(
        "model.path",
        spec.model.path,
        "AutoModelForCausalLM",
        trust_remote_code=spec.model.trust_remote_code,
        config_is_right=policy is not None,
        lora=spec.model.lora,
    )
    reward_faults, doubts = reward_problems(spec, everything), list[str]()
    if not reward_faults:
        reward_faults, doubts = trial_calls(spec, everything)
    problems += reward_faults
    problems += environment_problems(spec, policy)
    problems += _price_problems(spec)
    problems += _device_problems(spec)
    problems += _port_problems(spec)
    problems += missing_packages(spec.logging.trackers)
    problems += _folder_problems("output", spec.output)
    problems += _folder_problems("weights.folder", spec.weights.folder)
    problems += _batch_problems(spec)
    if policy:
        problems += [] if spec.supervised else _token_problems(spec, policy)
        problems += critic_problems(spec, policy)
        problems += teacher_faults(spec, policy, prompts.train if prompts else ())
        problems += checkpoint_problems(spec, policy)
    if prompts:
        problems += _prompt_problems(spec, prompts)
    if policy and prompts and resolved is not None:
        problems += _memory_problems(resolved, policy.shape)
    if problems or policy is None or prompts is None:
        raise InputError("the run cannot start", problems)
    max_model_len = _longest(spec, everything, policy)
    warnings = [*policy.warnings, *prompts.warnings, *_warnings(spec, everything, max_model_len, resolved), *doubts]
    warnings += attention_warnings(spec, max_model_len)
    prepared = Prepared(
        spec,
        resolved,
        policy.tokenizer_info,
        prompts.train,
        prompts.held_out,
        max_model_len,
        policy.shape,
        tuple(warnings),
        prompts.skipped,
        sizes or (),
    )
    return prepared if resolved is None else prepared.on(resolved)


def _resolved(spec: RunSpec, sequence_tokens: int | None) -> ResolvedRun | None:
    """Resolve a spec for this machine; None for a joined cluster, or without devices (see `_device_problems`)."""
    from rlhfless.prepare.machine import local_node  # imports torch, which would delay earlier errors

    if spec.placement.ray_address:
        return None
    try:
        return resolve(spec, [local_node(load_price_book(spec.scaling.prices).kinds)], sequence_tokens)
    except UserError:
        return None


def _sizes(spec: RunSpec, resolved: ResolvedRun) -> tuple[int, ...]:
    """Return the sizes on which an elastic run fits on this machine. Raises InputError if its `min` does not fit."""
    if spec.placement.size_range is None:
        return ()
    return tuple(each.devices for each in fitting_sizes(spec, resolved.devices.kind, resolved.devices.count))


def _longest(spec: RunSpec, prompts: Sequence[Prompt], policy: PolicyModel) -> int:
    """Return the tokens of the longest prompt plus response."""
    if spec.supervised:
        examples = cast(Sequence[Example], prompts)
        return max((len(tokens) for example in examples for tokens in example.sequences), default=0)
    wanted = max((len(prompt.token_ids) for prompt in prompts), default=0) + spec.generation.max_tokens
    return min(wanted, policy.context_tokens or wanted)


def _try(check: Callable[[], T], problems: list[Problem]) -> T | None:
    """Return the result of the check, or None after adding its problems to the list."""
    try:
        return check()
    except InputError as error:
        problems += error.problems
        return None


def _price_problems(spec: RunSpec) -> list[Problem]:
    where = OWN_DEVICES
    try:
        load_devices()
        where = "scaling.prices"
        load_price_book(spec.scaling.prices)
    except InputError as error:
        return [Problem(where, f"{error.source}: {problem}") for problem in error.problems]
    return []


def _device_problems(spec: RunSpec) -> list[Problem]:
    if spec.placement.ray_address:
        return []
    # Imported lazily because it imports torch, which would delay earlier errors.
    from rlhfless.prepare.machine import local_node
    from rlhfless.scaling.function_specs import place_run
    from rlhfless.scaling.latency.devices import UnknownAccelerator
    from rlhfless.scaling.placement import PlacementError

    try:
        place_run(spec, [local_node(load_price_book(spec.scaling.prices).kinds)])
    except (PlacementError, UnknownAccelerator) as error:
        return [Problem("placement", str(error))]
    except InputError:
        return []  # an unreadable price book is reported already
    return []


def _memory_problems(resolved: ResolvedRun, shape: ModelShape | None) -> list[Problem]:
    spec, kind = resolved.spec, resolved.devices.kind
    problems = [
        *resolved.problems(shape),
        *(capacity_problems(spec, host_memory_bytes()) if kind == CPU_KIND else ()),
    ]
    if problems or shape is None:
        return problems
    needed = Needed(published_bytes(shape, spec), stored_versions(spec), resolved.loading_bytes())
    return room_problems(needed, room_at(str(store_base(spec))))


def _port_problems(spec: RunSpec) -> list[Problem]:
    port = spec.logging.metrics_port
    if port is None:
        return []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            what = f"port {port} of the loopback interface is not free: {error.strerror}"
            return [Problem("logging.metrics_port", what, "choose another port, or leave it out")]
    return []


def _folder_problems(field: str, folder: str | None) -> list[Problem]:
    """Check, without writing, that the folder can be created and written to."""
    if folder is None:
        return []
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        return [Problem(field, f"{folder!r} cannot be a folder: {str(existing)!r} is a file", "name another one")]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [Problem(field, f"{folder!r} cannot be written: no permission in {str(existing)!r}", "name another one")]
    return []


def _batch_problems(spec: RunSpec) -> list[Problem]:
    groups = spec.prompts_per_step // spec.mini_batches
    pairs = spec.supervised and spec.sequences_per_prompt > 1  # each pair is learned from by a single rank
    sequences, noun = groups * (1 if pairs else spec.sequences_per_prompt), "pairs" if pairs else "sequences"
    if spec.learner.world_size <= sequences:
        return []
    what = f"{spec.learner.world_size} ranks, but a mini-batch has {sequences} {noun} ({groups} groups)"
    return [Problem("learner.ranks", what, f"set it to {sequences} or less, or make mini-batches larger")]


def _token_problems(spec: RunSpec, policy: PolicyModel) -> list[Problem]:
    problems = []
    context, most = policy.context_tokens, spec.generation.max_tokens
    # A default beyond the context shortens responses instead: see `_within_context` in planning/resolve.py.
    if context is not None and most > context - 1 and is_set(spec, "generation.max_tokens"):
        what = f"{most} leaves no room for a prompt in the context of {context} tokens"
        problems.append(Problem("generation.max_tokens", what, f"set it to at most {context - 1}"))
    vocabulary = policy.tokenizer_info.vocabulary_tokens
    unknown = [token for token in spec.generation.stop_token_ids if not 0 <= token < vocabulary]
    if unknown:
        what = f"{unknown[0]} is not a token: the vocabulary has {vocabulary}"
        problems.append(Problem("generation.stop_token_ids", what, f"use 0 to {vocabulary - 1}"))
    return problems


def _prompt_problems(spec: RunSpec, prompts: PromptSets) -> list[Problem]:
    problems = []
    if spec.prompts_per_step > len(prompts.train):
        what = f"{spec.prompts_per_step}, but there are {len(prompts.train)} training prompts"
        hint = f"set it to at most {len(prompts.train)}; no prompt may be twice in a step"
        problems.append(Problem("prompts_per_step", what, hint))
    problems += _share_problems(spec, prompts)
    if spec.evaluation.every_steps is not None and not prompts.held_out:
        what = "set, but there are no held-out prompts to evaluate on"
        more = "" if spec.supervised else " or evaluation.sets"
        hint = f"give {spec.data.section}.held_out{more}, or leave it out"
        problems.append(Problem("evaluation.every_steps", what, hint))
    return [*problems, *_best_problems(spec, prompts.held_out)]


def _share_problems(spec: RunSpec, prompts: PromptSets) -> list[Problem]:
    """Return the sets of a mixture with fewer prompts than their share of a step."""
    weights, problems = spec.data.weights, []
    for index, (name, weight) in enumerate(weights.items()):
        most = math.floor(spec.prompts_per_step * weight / sum(weights.values())) + (len(weights) > 1)
        total = sum(prompt.source == name for prompt in prompts.train)
        if most > total:
            what = f"{weight:g}, so a step has up to {most} of its {spec.prompts_per_step} prompts, and it has {total}"
            hint = "lower it, or prompts_per_step; no prompt may be twice in a step"
            problems.append(Problem(f"prompts.mixture.{index}.weight", what, hint))
    return problems


def _best_problems(spec: RunSpec, held_out: Sequence[Prompt]) -> list[Problem]:
    """Return a problem if the run will not have the metric of the best checkpoint, judging by its name."""
    metric = spec.checkpoint.best.metric
    family, slash, _ = metric.partition("/")
    figures = ("", "_greedy", *(f"_pass@{k}" for k in spec.evaluation.pass_at))
    sets = dict.fromkeys(f"eval/{prompt.source}/" if prompt.source else "eval/" for prompt in held_out)
    labels = [part.label for part in spec.rewards]
    of_pairs = {"preference_accuracy", "preference_margin", "chosen_reward", "rejected_reward"}
    written = {"loss", *(of_pairs if spec.type in ("dpo", "reward_model") else ())}
    known = {
        *(f"eval/{name}" for name in written if spec.supervised and held_out),
        *(["eval/reward_mean"] if held_out and not spec.supervised and spec.scores_samples else ()),
        *(name for name, declared in METRICS.items() if declared.label is None and name not in of_pairs - written),
        *(f"reward/{label}" for label in labels),
        *(f"{each}{label}{figure}" for each in sets for label in labels for figure in figures),
    }
    if metric in known or (slash and family in METRICS.keys() - {"reward", "eval"}):
        return []
    if family == "eval" and not held_out:
        what = f"{metric!r} is measured on held-out data, and this run has none"
        hint = f"give {spec.data.section}.held_out, such as {{fraction: 0.05}}, or name a metric of the steps"
        return [Problem("checkpoint.best.metric", what, hint)]
    hint = f"{nearest(metric, known)}Metrics are listed in docs/metrics.md"
    return [Problem("checkpoint.best.metric", f"{metric!r} is no metric of this run", hint)]


def _pass_warnings(spec: RunSpec, max_model_len: int) -> list[str]:
    if spec.learner.pass_tokens >= max_model_len:
        return []
    return [
        f"learner.micro_batch_tokens: {spec.learner.pass_tokens} is below the longest sequence of "
        f"{max_model_len} tokens; such a sequence gets a pass of its own, and more memory"
    ]


def _warnings(spec: RunSpec, prompts: Sequence[Prompt], max_model_len: int, resolved: ResolvedRun | None) -> list[str]:
    capacity = [*learning_rate_warnings(spec)]
    if resolved is not None and resolved.devices.kind == CPU_KIND:
        capacity += capacity_warnings(spec, resolved.devices.count)
    if spec.supervised:
        return [*_pass_warnings(spec, max_model_len), *capacity]
    warnings = []
    generation = spec.generation
    room = max_model_len - generation.max_tokens
    cut = sum(len(prompt.token_ids) > room for prompt in prompts)
    if cut:
        warnings.append(
            f"generation.max_tokens: for {cut} of {len(prompts)} prompts the context of {max_model_len} "
            f"tokens ends before {generation.max_tokens} response tokens; their responses end earlier"
        )
    if generation.top_p != 1 or generation.top_k != 0:
        warnings.append(
            f"generation: top_p {generation.top_p:g} and top_k {generation.top_k} cut the distribution that "
            "is sampled from, which biases the ratio between learner and engine; leave them at 1 and 0"
        )
    warnings += _pass_warnings(spec, max_model_len)
    bounds = spec.scaling.generation
    undecided = bounds.max_actors == "auto" and spec.placement.ray_address is not None
    # The spec of a resumed run contains all defaults, so set keys carry no information.
    if spec.scaling.contract != type(spec.scaling)().contract and bounds.fixed and not undecided:
        warnings.append(
            f"scaling.contract: has no effect, because the number of generation actors is always {bounds.min_actors}; "
            "lower scaling.generation.min_actors or raise max_actors to leave the number to it"
        )
    return [*warnings, *capacity, *reward_warnings(spec, prompts)]
