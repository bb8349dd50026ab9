"""Spec files as users write them: what is accepted, what is refused, and whether the message helps."""

import json
import pickle

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.sim.scenarios import Scenario
from rlhfless.spec import ExactMatchSpec, PythonRewardSpec, RunSpec
from rlhfless.spec.data import DATA
from rlhfless.spec.document import dump, parse
from rlhfless.spec.errors import SpecError
from rlhfless.spec.explain import keys
from rlhfless.spec.load import json_schema, load_spec, resolved_yaml
from rlhfless.spec.removed import NAMES, removed_problems

MINIMAL = """\
model:
  path: Qwen/Qwen3-0.6B
prompts:
  path: train.jsonl
rewards:
- type: exact_match
"""


@pytest.fixture
def load(tmp_path):
    """Writes the text and loads it with overrides."""

    def write_and_load(text, *overrides, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return load_spec(path, overrides)

    return write_and_load


@pytest.fixture
def fault(load):
    """The message that the text is refused with."""

    def refused(text, *overrides, **options):
        with pytest.raises(SpecError) as caught:
            load(text, *overrides, **options)
        return str(caught.value)

    return refused


# -- what is accepted


def test_a_minimal_spec_gets_every_default(load, tmp_path):
    spec = load(MINIMAL)
    assert spec.steps == 100
    assert spec.rewards == (ExactMatchSpec(type="exact_match"),)
    assert spec.prompts.path == str(tmp_path / "train.jsonl")


def test_json_is_read_by_content_even_when_indented_with_tabs(load):
    data = yaml.safe_load(MINIMAL) | {"steps": 7, "name": "json"}
    spec = load(json.dumps(data, indent="\t"), name="run.yaml")
    assert (spec.steps, spec.name) == (7, "json")


def test_json_escapes_of_characters_beyond_16_bits_are_kept(load):
    data = yaml.safe_load(MINIMAL) | {"generation": {"stop": ["\U0001f600"]}}
    assert load(json.dumps(data)).generation.stop == ("\U0001f600",)


def test_yaml_means_what_it_looks_like(load):
    """YAML 1.1 would read `off` as false, 1e-6 as a text, and 010 as eight."""
    spec = load(MINIMAL + "logging: {console: off}\noptimizer: {learning_rate: 1e-6}\nsteps: 010\n")
    assert spec.logging.console == "off"
    assert spec.optimizer.learning_rate == 1e-6
    assert spec.steps == 10


def test_the_resolved_spec_loads_back_equal(load):
    spec = load(
        MINIMAL
        + "- {type: python, name: judge, target: 'a.b:c', kwargs: {x: '1e-6', y: [1, null, 'off'], z: ~}}\n"
        + "generation: {stop: ['true', '---', 'é: #']}\n"
    )
    again = load(resolved_yaml(spec))
    assert again == spec
    assert isinstance(again.rewards[1], PythonRewardSpec)
    assert again.rewards[1].kwargs["x"] == "1e-6"


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.dictionaries(st.text(min_size=1), SCALARS | st.lists(SCALARS, max_size=3), max_size=4))
def test_whatever_is_dumped_is_parsed_back(data):
    assert parse(dump(data)).data == data


def test_schema_is_a_json_schema_with_the_help_texts():
    schema = json_schema()
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == {"model"}, "what else is needed depends on the type"
    assert schema["properties"]["steps"]["description"] == "Training steps."
    assert set(schema["properties"]) == set(RunSpec.model_fields)


# -- paths


def test_paths_in_a_file_count_from_its_folder_and_in_overrides_from_the_current_one(load, tmp_path, monkeypatch):
    here = tmp_path / "elsewhere"
    (here / "other").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(here)
    text = MINIMAL.replace("Qwen/Qwen3-0.6B", "model")
    assert load(text).model.path == str(tmp_path / "model")
    assert load(text, "model.path=other").model.path == str(here / "other")
    assert load(text, "prompts.path=../x.jsonl").prompts.path == str(tmp_path / "x.jsonl")
    assert load(text, "prompts.held_out={path: h.jsonl}").prompts.held_out.path == str(here / "h.jsonl")


def test_a_hub_name_stays_as_it_is_and_so_does_the_output(load):
    spec = load(MINIMAL.replace("train.jsonl", "openai/gsm8k:main"))
    assert spec.model.path == "Qwen/Qwen3-0.6B"
    assert spec.prompts.path == "openai/gsm8k:main"
    assert spec.output == "runs"


# -- overrides


def test_overrides_reach_sections_lists_and_keys_that_the_file_leaves_out(load):
    spec = load(MINIMAL, "steps=10", "rewards.0.weight=2.5", "algorithm.kl.coefficient=1e-3", "generation.stop=[a, b]")
    assert spec.steps == 10
    assert spec.rewards[0].weight == 2.5
    assert spec.algorithm.kl.coefficient == 1e-3
    assert spec.generation.stop == ("a", "b")


def test_an_empty_override_is_null(load):
    assert load(MINIMAL, "algorithm.importance=").algorithm.importance is None


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("steps", ["`--set steps`", "key=value", "--set steps=10"]),
        ("=3", ["`--set =3`", "key=value"]),
        ("steps=ten", ["steps (--set steps=ten)", "'ten'", "valid integer"]),
        ("stesp=10", ["stesp (--set stesp=10)", "unknown key", "did you mean `steps`?"]),
        ("algorithm.kl.coeficient=1", ["algorithm.kl.coeficient", "did you mean `coefficient`?"]),
        ("rewards.1.weight=2", ["rewards.1", "not an index", "1 items", "use 0 to 0"]),
        ("rewards.first.weight=2", ["rewards.first", "not an index"]),
        ("model.path.x=2", ["model.path.x", "model.path is 'Qwen/Qwen3-0.6B'"]),
        ("generation.stop=[a", ["generation.stop", "'[a'", "quote it"]),
        (r'output="caf\udce9"', ["output (--set output=", r"'caf\udce9' is not valid Unicode", "rename the file"]),
        (r'rewards.0.name="a\0"', ["rewards.0.name (--set", r"'a\x00' is not valid Unicode, or holds a NUL"]),
    ],
)
def test_a_wrong_override_is_explained(fault, override, parts):
    message = fault(MINIMAL, override)
    assert all(part in message for part in parts), message


# -- unknown keys, wrong types, wrong values


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        ("algorithm: remax", "algorithm (line 7)"),
        ("algorithm: {type: remax}", "algorithm.type (line 7)"),
        ("algorithm:\n  type: remax\n  kl: {coefficient: 0.1}\n  clip_low: 0.1", "algorithm.type (line 8)"),
    ],
)
def test_a_removed_value_names_the_way_out(fault, lines, where):
    message = fault(f"{MINIMAL}{lines}\nstesp: 4")
    assert f"- {where}: 'remax' was removed\n    Use `rloo`" in message
    assert "`grpo`" in message
    assert "is no algorithm" not in message
    assert "stesp (line" in message, "the other problems are shown, too"
    assert "2 problems" in message


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("algorithm.type=remax", "algorithm.type (--set algorithm.type=remax)"),
        ("algorithm=remax", "algorithm (--set algorithm=remax)"),
    ],
)
def test_a_removed_value_of_an_override_names_the_way_out(fault, override, where):
    assert f"{where}: 'remax' was removed" in fault(MINIMAL, override)


@pytest.mark.parametrize(
    ("lines", "problem", "hint"),
    [
        ("schedule: {type: sync, streaming: true}", "schedule.streaming (line 7): was removed", "`schedule: async`"),
        ("schedule: {streaming: false}", "schedule.streaming (line 7): was removed", "`sync` without this key"),
        ("schedule: tail_batching", "schedule (line 7): 'tail_batching' was removed", "`schedule: partial`"),
        (
            "schedule: {type: tail_batching, over_sampling: 1.5}",
            "schedule.type (line 7): 'tail_batching' was removed",
            "`schedule: partial`",
        ),
        ("schedule: auto", "schedule (line 7): 'auto' was removed", "`rlhfless plan`"),
        ("optimizer: {type: adamw}", "optimizer.type (line 7): was removed", "the optimizer is AdamW"),
        ("logging: {jsonl: false}", "logging.jsonl (line 7): was removed", "metrics.jsonl is always written"),
        ("learner: {min_ranks: 2}", "learner.min_ranks (line 7): was removed", "`placement.devices: {min: 2, max: 8}`"),
        ("- {type: code, file_mib: 1}", "rewards.1.file_mib (line 7): was removed", "files of up to 16 MiB"),
        ("schedule: {type: auto, least_saving: 0.1}", "schedule.type (line 7): 'auto' was removed", "Name one"),
    ],
)
def test_a_removed_key_names_the_way_out(fault, lines, problem, hint):
    message = fault(f"{MINIMAL}{lines}")
    assert problem in message
    assert hint in message
    assert "1 problem" in message


@pytest.mark.parametrize("model", [RunSpec, Scenario])
def test_no_key_in_use_is_called_removed(model):
    in_use = set(keys(model))
    assert "steps" in in_use
    assert not in_use & {spelling for spelling in model.removed if "=" not in spelling}


def test_a_removed_key_is_told_from_an_unknown_one():
    removed = {"schedule.streaming": "leave it out", "rewards.*.old": "use new"}
    data = {"schedule": {"streaming": {"on": True}}, "rewards": [{}, {"old": 1}], "metadata": {"streaming": "remax"}}
    assert [(problem.where, problem.what, problem.hint) for _, problem in removed_problems(data, removed)] == [
        ("schedule.streaming", "was removed", "leave it out"),
        ("rewards.1.old", "was removed", "use new"),
    ]


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (
            "  wieght: 2",
            ["rewards.0.wieght (line 7)", "unknown key", "did you mean `weight`?", "answer_field"],
        ),
        ("stesp: 4", ["stesp (line 7)", "did you mean `steps`?", "Valid keys here: type, name, model"]),
        ("schedule: {max_staleness: 2}", ["schedule.max_staleness (line 7)", "a key of other types: partial, async."]),
        ("learning_rate: 1", ["learning_rate", "did you mean `optimizer.learning_rate`?"]),
        ("optimizer: {schedule: linear}", ["optimizer.schedule", "did you mean `rate_schedule`?"]),
        ("evaluation: {steps: 5}", ["evaluation.steps", "did you mean `every_steps`?"]),
        ("num_generations: 8", ["num_generations (line 7)", "here it is `samples_per_prompt`."]),
        ("optimizer: {lr_scheduler_type: cosine}", ["here it is `optimizer.rate_schedule`."]),
        ("generation:\n  temperatur: 1", ["generation.temperatur (line 8)", "did you mean `temperature`?"]),
        (
            "- type: exactmatch",
            ["rewards.1.type (line 7)", "'exactmatch'", "did you mean `exact_match`?", "python, regex"],
        ),
        ("- weight: 3", ["rewards.1.type", "missing", "Valid types: code, exact_match"]),
        ("- exact_match", ["rewards.1 (line 7)", "'exact_match'", "start it with `type:`"]),
        ("- {type: regex, pattern: '('}", ["rewards.1.pattern", "'('", "not a regular expression"]),
        ("- {type: python, target: score}", ["rewards.1.target", "'score'", "package.module:function"]),
        ("- {type: regex}", ["rewards.1.pattern", "missing"]),
        ("- {type: exact_match, weight: 2}", ["two rewards are called 'exact_match'", "`name`"]),
        ("steps: ten", ["steps (line 7)", "'ten'", "valid integer"]),
        ("steps: 0", ["steps (line 7)", "0:", "greater than or equal to 1"]),
        ("generation: {temperature: -1}", ["generation.temperature", "-1", "greater than 0"]),
        ("generation:", ["generation (line 7)", "section", "None", "max_tokens", "leave it out"]),
        ("generation: hot", ["generation (line 7)", "section", "'hot'"]),
        ("logging: {console: of}", ["logging.console", "'of'", "'live', 'lines' or 'off'"]),
        ("logging: {console: line}", ["did you mean `lines`?"]),
        ("algorithm: {type: a2c}", ["algorithm.type", "'a2c'", "'grpo'"]),
        ("samples_per_prompt: 1", ["samples_per_prompt is 1", "set it to 2 or more"]),
        (
            "optimizer: {rate_schedule: linear, warmup_steps: 200}\nsteps: 100\nmini_batches: 2",
            ["optimizer.warmup_steps is 200", "plans 200 optimiser steps", "set warmup_steps below 200"],
        ),
        ("optimizer: {moment_bits: 8}", ["optimizer.moment_bits", "was removed", "learner.offload: true"]),
        (
            "evaluation: {pass_at: [1, 8], samples_per_prompt: 4}",
            ["evaluation", "pass_at has 8", "samples_per_prompt is 4", "set samples_per_prompt to 8"],
        ),
        ("evaluation: {sets: [{name: a, path: /x}, {name: a, path: /y}]}", ["two sets are called 'a'"]),
        ("checkpoint: {best: {mode: most}}", ["checkpoint.best.mode", "'most'", "'max' or 'min'"]),
        ("epochs: 0", ["epochs (line 7)", "0", "1"]),
        ("mini_batches: 65", ["mini_batches (65)", "prompts_per_step (64)"]),
        ("weights: {transport: rdma}", ["weights.transport", "'rdma'", "'file', 'shared_memory', 'http', 'nccl'"]),
        ("weights: {store: http}", ["weights.store", "unknown"]),
        (
            "weights: {transport: cuda_ipc}\nlearner: {ema_decay: 0.99}",
            ["learner.ema_decay is given", "weights.transport is cuda_ipc", "set weights.transport to auto"],
        ),
        ("learner: {ema_decay: 1.0}", ["learner.ema_decay", "1.0", "less than 1"]),
        (
            "weights: {transport: nccl}",
            ["weights.transport is nccl", "min_actors 1 and max_actors auto", "a fixed number of actors"],
        ),
        ("name: My Run", ["name (line 7)", "'My Run'", "pattern"]),
        ("optimizer: {learning_rate: .nan}", ["optimizer.learning_rate", "nan", "finite"]),
        (
            '- {type: python, target: "a:b", kwargs: {k: ["\\ud800"]}}',
            ["rewards.1.kwargs.k.0 (line 7)", "not valid Unicode"],
        ),
        ("steps: 3\nsteps: 4", ["steps (line 8)", "given twice", "line 7"]),
        ("steps: " + "1" * 5000, ["line 7", "a number of 5,000 characters"]),
        ("kwargs: &a [*a]", ["line 7: nested too deeply (more than 64 levels), or an alias that holds itself"]),
        (
            "learner: {ranks: 16, shard_ranks: 5}",
            ["learner (line 7): shard_ranks is 5, and 16 ranks are", "set it to 4"],
        ),
    ],
)
def test_a_wrong_key_or_value_is_explained(fault, lines, parts):
    message = fault(MINIMAL + lines + "\n")
    assert all(part in message for part in parts), message


def test_a_number_that_is_too_long_is_refused_and_not_repeated(fault):
    in_json, in_override = fault('{"steps": ' + "1" * 5000 + "}"), fault(MINIMAL, "steps=" + "1" * 5000)
    assert "not JSON" in in_json
    assert "4300 digits" in in_json
    assert "a number of 5,000 characters" in in_override
    assert len(in_override) < 500


def test_what_is_missing_is_named_with_its_meaning(fault):
    message = fault("steps: 3\n")
    assert "3 problems" in message
    assert "model: missing" in message
    assert "prompts: missing" in message
    assert "rewards: missing" in message
    assert "Hugging Face format" in message


def test_a_value_that_is_none_of_a_fields_alternatives_is_one_problem_of_the_field(fault):
    message = fault(MINIMAL + "learner: {ranks: many}\nweights: {transport: rdma}\n")
    assert "2 problems" in message
    assert "learner.ranks (line 7): 'many': should be a valid integer" in message
    assert "as an integer, or should be 'auto'" in message
    assert "weights.transport (line 8): 'rdma': should be 'auto', or should be 'file', 'shared_memory'" in message


def test_a_list_that_is_not_one(fault):
    message = fault(MINIMAL.replace("- type", "  type"))
    assert "rewards (line 5): should be a list, got {'type': 'exact_match'}" in message
    assert "starts with `- `" in message


def test_an_empty_list_of_rewards(fault):
    message = fault(MINIMAL.replace("- type: exact_match", "  []"))
    assert "rewards (line 5): missing, and it has no default" in message


def test_all_problems_are_told_at_once(fault):
    message = fault(MINIMAL + "  wieght: 2\nstesp: 4\ngeneration: {temperature: 0}\n", "steps=ten", "foo")
    for part in ("5 problems", "wieght", "stesp", "temperature", "'ten'", "--set foo"):
        assert part in message


# -- files


def test_no_such_file_names_the_nearest(load, tmp_path):
    load(MINIMAL)
    with pytest.raises(SpecError, match=r"rnu\.yaml: 1 problem\n- no such file\n    did you mean `run\.yaml`\?"):
        load_spec(tmp_path / "rnu.yaml")


def test_a_folder_is_not_a_spec(tmp_path):
    with pytest.raises(SpecError, match="is a folder"):
        load_spec(tmp_path)


def test_a_binary_file_is_not_a_spec(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"abc\xff\xfe")
    with pytest.raises(SpecError, match=r"not UTF-8 text: byte 3 is 0xff"):
        load_spec(path)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["the file is empty", "`model`, `prompts` and `rewards`"]),
        ("# nothing\n", ["the file is empty"]),
        ("- a\n- b\n", ["mapping of keys", "got a list"]),
        ("steps: 3\n\tseed: 4\n", ["line 2, column 1", "not with tabs"]),
        ("a: [1, 2\nb: 3\n", ["line 2", "not YAML"]),
        ('{\n  "steps": 3,\n}', ["line", "not JSON"]),
        ('{"steps": 3, "steps": 4}', ["steps (line 1)", "given twice"]),
        ("steps: !!python/name:os.system\n", ["line 1", "tag", "not supported"]),
        ("a: 1\n---\nb: 2\n", ["line 2", "single document"]),
    ],
)
def test_an_unreadable_file_is_explained_with_its_line(fault, text, parts):
    message = fault(text)
    assert all(part in message for part in parts), message


def test_a_spec_error_survives_pickling(load):
    with pytest.raises(SpecError) as caught:
        load("steps: ten")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.problems == caught.value.problems


# -- documents that are too large


BOMB = "\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]"
                                                          for i in range(1, 9))])  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "line 1: more than 100,000 values, with each alias (`*name`) written out"),
        ("a: &a [*a]", "line 1: nested too deeply (more than 64 levels), or an alias that holds itself"),
        ("steps: 1\na: " + "[" * 2000 + "]" * 2000, "line 2: nested too deeply (more than 64 levels)"),
        ("\n".join("  " * depth + "a:" for depth in range(100)), "line 65: nested too deeply (more than 64 levels)"),
        ('{"a":\n' + "[" * 100 + "]" * 100 + "}", "line 2: nested too deeply (more than 64 levels)"),
        ('{"a": ' + "[" * 200_000, "line 1: nested too deeply (more than 64 levels)"),
        ("a: &a " + "x" * 100_000 + "\nb: [" + "*a, " * 100 + "]", "line 1: more than 4,194,304 characters"),
        ("a: " + "x" * 5_000_000, "more than 4,194,304 characters"),
    ],
)
def test_a_document_that_is_too_large_is_refused_with_its_line(text, message, tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    assert f"{file}: 1 problem\n- {message}" in str(caught.value)


def test_a_file_without_an_end_is_not_read_to_its_end():
    with pytest.raises(SpecError, match="more than 4,194,304 characters"):
        load_spec("/dev/zero")


def test_names_of_other_tools_stand_for_keys_and_are_none_themselves() -> None:
    known = set(keys(RunSpec))
    assert set(NAMES.values()) <= known
    assert not set(NAMES) & known


@pytest.mark.parametrize(
    ("run_type", "key", "hint"),
    [
        ("rlhf", "train_dataset", "here it is `prompts.path`"),
        ("sft", "train_dataset", "here it is `demonstrations.path`"),
        ("dpo", "eval_dataset", "here it is `preferences.held_out`"),
        ("reward_model", "dataset_name", "here it is `preferences.path`"),
        ("sft", "lr", "here it is `optimizer.learning_rate`"),
        ("dpo", "kl_coef", None),
        ("sft", "num_generations", None),
    ],
)
def test_names_of_other_tools_stand_for_keys_of_the_runs_type(load, run_type, key, hint) -> None:
    text = MINIMAL if run_type == "rlhf" else f"model: {{path: m}}\n{DATA[run_type]}: {{path: d.jsonl}}\n"
    with pytest.raises(SpecError) as caught:
        load(f"type: {run_type}\n{text}{key}: x\n")
    message = str(caught.value)
    assert hint in message if hint else "here it is" not in message
