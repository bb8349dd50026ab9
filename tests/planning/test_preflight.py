"""Everything that is found before a run is started."""

import json
import os
import socket
import sys

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoTokenizer

from rlhfless.planning.inputs import DeviceCount
from rlhfless.planning.preflight import preflight
from rlhfless.planning.resolve import question_of, resolve
from rlhfless.prepare import rewards as reward_checks
from rlhfless.rewards.confinement import Protection
from rlhfless.scaling.placement import Node
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import InputError


@pytest.fixture
def check(model_folder, write_rows, tmp_path):
    """Runs preflight on a spec that is right but for the given parts."""
    rows = write_rows([{"prompt": f"w{i} w{i + 1}", "answer": i} for i in range(8)])

    def run(**parts):
        spec = {
            "model": {"path": str(model_folder)},
            "prompts": {"path": str(rows)},
            "rewards": [{"type": "exact_match"}],
            "generation": {"max_tokens": 16},
            "prompts_per_step": 4,
            "output": str(tmp_path / "runs"),
        }
        return preflight(RunSpec.model_validate(spec | parts))

    run.model = {"path": str(model_folder)}
    return run


@pytest.fixture
def fault(check):
    def refused(**parts):
        with pytest.raises(InputError) as caught:
            check(**parts)
        return str(caught.value)

    return refused


def test_a_right_spec_is_prepared(check, model_folder, tmp_path):
    prepared = check()
    assert len(prepared.train) == 8
    assert prepared.tokenizer.path == str(model_folder)
    assert (prepared.tokenizer.pad_token_id, prepared.tokenizer.eos_token_id) == (0, 1)
    assert prepared.max_model_len == 2 + 16  # the longest prompt and max_tokens: less than the context of 32
    assert prepared.warnings == ()
    assert not (tmp_path / "runs").exists()


def test_all_problems_are_told_at_once(fault, tmp_path):
    message = fault(
        model={"path": str(tmp_path / "none")},
        prompts={"path": str(tmp_path / "none.jsonl")},
        rewards=[{"type": "python", "target": "nowhere:score"}],
        scaling={"prices": str(tmp_path / "none.yaml")},
        learner={"ranks": 99},
    )
    assert message.startswith("the run cannot start: ")
    for field in ("model.path", "prompts.path", "rewards.0", "scaling.prices", "learner.ranks"):
        assert f"- {field}: " in message


# -- the model


def test_a_folder_that_is_not_there_names_the_nearest(fault, model_folder):
    message = fault(model={"path": str(model_folder.parent / "modle")})
    assert "modle': no such folder, and not a hub name" in message
    assert "did you mean `model`?" in message


def hub_answers(monkeypatch, answer):
    """Let the hub raise `answer` when it is asked for a model."""

    def model_info(*_, **__):
        raise answer

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)


def test_a_hub_that_cannot_be_reached_is_asked_once(fault, monkeypatch):
    hub_answers(monkeypatch, OSError("no route"))
    message = fault(model={"path": "Qwen/Qwen9-0.6B"})
    assert "'Qwen/Qwen9-0.6B': no such folder, and https://huggingface.co cannot be reached (OSError)" in message
    assert "a hub name needs the network" in message


def test_a_mistyped_folder_that_could_be_a_hub_name(fault, model_folder, monkeypatch):
    hub_answers(monkeypatch, OSError("no route"))
    monkeypatch.chdir(model_folder.parent)
    assert "'modle': no such folder" in fault(model={"path": "modle"})
    message = fault(model={"path": str(model_folder.with_name("modle"))})
    assert "did you mean `model`?" in message


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_no_name_of_the_hub_is_looked_for_in_the_working_directory(fault, model_folder, monkeypatch, kind, tmp_path):
    """Libraries would take it from there, without the hub."""
    here = tmp_path / "here"
    (here / "owner").mkdir(parents=True)
    if kind == "link":
        (here / "owner" / "name").symlink_to(model_folder)
    else:
        model_folder.rename(here / "owner" / "name")
    monkeypatch.chdir(here)
    hub_answers(monkeypatch, OSError("no route"))
    for field in ("path", "tokenizer"):
        there = {"path": str((here / "owner" / "name").resolve()), field: "owner/name"}
        assert f"model.{field}: 'owner/name' is no absolute path" in fault(model=there)
    reward = {"type": "reward_model", "path": "owner/name"}
    assert "'owner/name' is no absolute path" in fault(rewards=[reward])


def test_a_hub_name_whose_files_cannot_be_read_says_why(fault, monkeypatch):
    def unreadable(path, **_):
        raise OSError(f"{path} has no file named config.json.\nCheck the repository.")

    hub_answers(
        monkeypatch,
        GatedRepoError("ask its owner", response=httpx.Response(403, request=httpx.Request("GET", "https://hub"))),
    )
    monkeypatch.setattr(AutoConfig, "from_pretrained", unreadable)
    message = fault(model={"path": "Qwen/Qwen9-0.6B"})
    assert "cannot read the configuration of 'Qwen/Qwen9-0.6B': OSError: Qwen/Qwen9-0.6B has no file" in message
    assert "your login" in message


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, ["not a causal language model", "ForCausalLM"]),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            ["LlamaForSequenceClassification", "not a causal"],
        ),
        ({"model_type": "vit"}, ["not a causal language model"]),
        ({"model_type": "none-such"}, ["cannot read the configuration", "none-such"]),
        ({"vocab_size": 10}, ["model.tokenizer", "has 64 tokens", "vocabulary has 10"]),
    ],
)
def test_a_model_that_cannot_be_a_policy_is_refused(fault, edit_config, changes, parts):
    edit_config(**changes)
    message = fault()
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("[]", "it is a list, not a mapping"),
        ('{"text_config": []}', "it is a list, not a mapping"),
        ("[" * 100_000, "nested too deeply"),
        ('{"hidden_size": ' + "1" * 5000 + "}", "4300 digits"),
    ],
)
def test_a_config_that_is_none_is_refused_by_the_plan(model_folder, content, part):
    """`validate` and `run` ask the plan first, and go on without it where it cannot be made."""
    (model_folder / "config.json").write_text(content)
    run = {"model": {"path": str(model_folder)}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}
    spec = RunSpec.model_validate(run)
    with pytest.raises(InputError, match=part):
        question_of(spec, "cpu-core", 2)
    resolve(spec, DeviceCount("cpu-core", 2))


def test_a_folder_without_a_tokenizer_is_not_blamed_on_the_prompts(fault, model_folder):
    """From the folder of a family that has a class of its own, transformers makes an empty tokenizer."""
    config = json.loads((model_folder / "config.json").read_text()) | {"model_type": "qwen3"}
    (model_folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model_folder / name).unlink()
    message = fault()
    assert "no tokenizer" in message
    assert "remove these rows" not in message


def test_a_folder_without_config_weights_or_tokenizer(fault, model_folder):
    for name, part in (
        ("tokenizer.json", "cannot read the tokenizer of"),
        ("model.safetensors", "has no weights (model.safetensors or pytorch_model.bin, in one file or in shards"),
        ("config.json", "has no config.json"),
    ):
        (model_folder / name).unlink()
        assert part in fault()


def test_a_folder_with_half_of_its_weights(fault, model_folder):
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (model_folder / "model.safetensors").unlink()
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({}, model_folder / "model-1-of-2.safetensors")
    assert "lacks 1 of 2 weight files, such as model-2-of-2.safetensors" in fault()


def test_weights_that_were_never_fetched(fault, model_folder):
    (model_folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "Git LFS pointer" in fault()
    assert "git lfs pull" in fault()


def test_a_file_is_not_a_model(fault, model_folder):
    assert "is a file" in fault(model={"path": str(model_folder / "config.json")})


def test_no_padding_token_falls_back_with_a_warning_and_no_end_token_is_refused(check, fault, model_folder):
    path = model_folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["pad_token"]
    path.write_text(json.dumps(config))
    prepared = check()
    assert prepared.tokenizer.pad_token_id == prepared.tokenizer.eos_token_id == 1
    assert "no padding token; its end-of-sequence token '<eos>' pads instead" in prepared.warnings[0]
    del config["eos_token"]
    path.write_text(json.dumps(config))
    assert "has no end-of-sequence token" in fault()


def test_a_padding_token_that_was_added_without_a_row_of_the_model(check, fault, model_folder, edit_config):
    """Llama 2 has no padding token, and many tools add one: nothing is ever padded with it."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(model_folder)
    prepared = check()
    assert "'[PAD]' is beyond the model's vocabulary; its end-of-sequence token '<eos>' pads" in prepared.warnings[0]
    assert prepared.tokenizer.pad_token_id == prepared.tokenizer.eos_token_id
    assert prepared.tokenizer.vocabulary_tokens == 64
    edit_config(vocab_size=63)
    assert "has 65 tokens, but the model's vocabulary has 63" in fault()


# -- lengths


def test_a_context_above_the_models_own(fault, model_folder):
    message = fault(model={"path": str(model_folder), "max_context_tokens": 64})
    assert "model.max_context_tokens: 64 is above the model's own limit of 32 tokens" in message


def test_no_room_for_a_prompt(fault):
    message = fault(generation={"max_tokens": 32})
    assert "generation.max_tokens: 32 leaves no room for a prompt in the context of 32" in message
    assert "at most 31" in message


def test_responses_that_may_be_cut_short_are_warned_of(check):
    prepared = check(generation={"max_tokens": 31})
    assert prepared.max_model_len == 32
    assert "for 8 of 8 prompts the context of 32 tokens ends before 31 response tokens" in prepared.warnings[0]


def test_a_prompt_longer_than_the_context(fault, write_rows):
    path = write_rows([{"prompt": "w1", "answer": 1}, {"prompt": "w1 " * 33, "answer": 1}], "long.jsonl")
    message = fault(prompts={"path": str(path)}, prompts_per_step=1)
    assert "more than 31 tokens" in message
    assert "long.jsonl:2: 33 tokens" in message


def test_a_stop_token_outside_the_vocabulary(fault):
    message = fault(generation={"max_tokens": 16, "stop_token_ids": [1, 64]})
    assert "generation.stop_token_ids: 64 is not a token: the vocabulary has 64" in message


# -- prompts, rewards, batches


def test_fewer_prompts_than_a_step_takes(fault):
    message = fault(prompts_per_step=9)
    assert "prompts_per_step: 9, but there are 8 training prompts" in message
    assert "at most 8" in message


def test_a_reward_that_does_not_fit_the_prompts(fault):
    message = fault(
        rewards=[
            {"type": "exact_match", "answer_field": "solution"},
            {"type": "python", "target": "json:loads"},
        ]
    )
    assert "rewards.0: reward 'exact_match': the column `solution` is missing in" in message
    assert "rewards.1: reward 'python': 'json:loads' requires `s`" in message


FAULTY = """
def raises(response): raise KeyError("gold")
def none(response): return None
def nan(response): return float("nan")
def text(response): return "0.5"
def huge(response): return 1e12
def stops(response): raise SystemExit(3)
def few(response, answer): return 1 / int(answer)
def sound(response, answer): return float(str(answer) in response)
def siblings(response, prompt_id):
    assert len(set(zip(prompt_id, response))) == len(response) == 2 * len(set(prompt_id))
    return [0.5] * len(response)
def hangs(response):
    import time
    time.sleep(60)
"""


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """Spec parts with a reward of a module whose functions are broken in one way each."""
    (tmp_path / "faulty_rewards.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "faulty_rewards", raising=False)

    def parts(name, **keys):
        return {"rewards": [{"type": "python", "name": "judge", "target": f"faulty_rewards:{name}", **keys}]}

    return parts


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("raises", "'faulty_rewards:raises' raised KeyError: 'gold'"),
        ("none", "returned 'None', not a finite number"),
        ("nan", "returned 'nan', not a finite number"),
        ("text", "returned \"'0.5'\", not a finite number"),
        ("huge", "'judge' gave 1e+12, beyond the range"),
        ("stops", "raised SystemExit: 3"),
    ],
)
def test_a_reward_that_gives_no_number_is_found_by_a_trial_call(fault, faulty, name, cause):
    message = fault(**faulty(name))
    assert "rewards.0: reward 'judge': 8 of 8 trial calls on made responses failed; the first: sample 0 of" in message
    assert cause in message
    assert "return a finite number for every response" in message


def test_a_trial_call_stops_a_run_by_the_rule_of_its_steps(check, fault, faulty):
    """The first of eight rows has the answer 0, by which the reward divides."""
    assert check(**faulty("sound")).warnings == ()
    (warning,) = check(**faulty("few")).warnings
    assert warning.startswith("rewards.0: reward 'judge': 1 of 8 trial calls on made responses failed; the first: ")
    assert "1 of 8 trial calls" in fault(**faulty("few"), scoring={"on_failure": "fail"})
    assert "8 of 8 trial calls" in check(**faulty("raises"), scoring={"max_failed": 1.0}).warnings[0]


def test_a_reward_of_lists_is_tried_with_siblings(check, faulty):
    assert check(**faulty("siblings", batch=True), samples_per_prompt=2).warnings == ()


def test_a_reward_that_hangs_is_not_waited_for(check, faulty, monkeypatch):
    monkeypatch.setattr(reward_checks, "TRIAL_S", 0.5)
    (warning,) = check(**faulty("hangs")).warnings
    assert warning == "rewards.0: reward 'judge': 8 of 8 trial calls did not end within 0.5 s"


def test_evaluation_without_prompts(fault):
    assert "evaluation.every_steps: set, but there are no held-out prompts" in fault(evaluation={"every_steps": 5})


def test_more_ranks_than_sequences(fault):
    message = fault(learner={"ranks": 20}, mini_batches=2, samples_per_prompt=4)
    assert "learner.ranks: 20 ranks, but a mini-batch has 8 sequences (2 groups)" in message


def test_a_resumed_run_is_not_warned_of_its_defaults(check):
    assert check(scaling={"contract": {"type": "weighted"}}).warnings == check().warnings


def test_settings_that_do_harm_or_nothing_are_warned_of(check):
    warnings = "\n".join(
        check(
            generation={"max_tokens": 16, "top_p": 0.9},
            learner={"micro_batch_tokens": 10},
            rewards=[{"type": "length_penalty", "free_tokens": 16, "max_tokens": 20}],
            scaling={"contract": {"type": "cheapest", "deadline_s": 120}},
        ).warnings
    )
    assert "scaling.contract: has no effect, because the number of generation actors is always 1" in warnings
    assert "generation: top_p 0.9 and top_k 0 cut the distribution" in warnings
    assert "learner.micro_batch_tokens: 10 is below the longest sequence of 18 tokens" in warnings
    assert "rewards.0: no response is longer than free_tokens (16)" in warnings


# -- the machine


def test_a_port_that_is_taken(fault):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = fault(logging={"metrics_port": port})
    assert f"logging.metrics_port: port {port} of the loopback interface is not free" in message


def test_an_output_that_cannot_be_a_folder(fault, tmp_path):
    (tmp_path / "file").touch()
    assert "output: " in fault(output=str(tmp_path / "file" / "runs"))
    assert f"'{tmp_path / 'file'}' is a file" in fault(output=str(tmp_path / "file"))


def test_more_devices_than_there_are(fault):
    message = fault(placement={"devices": 4096})
    assert "placement: placement.devices asks for 4096 device(s)" in message


def test_a_price_book_that_cannot_be_read(fault, tmp_path):
    (tmp_path / "prices.yaml").write_text("devices: 3\n")
    message = fault(scaling={"prices": str(tmp_path / "prices.yaml")})
    assert "scaling.prices: " in message
    assert "should be a list, got 3" in message


def test_a_reward_model_that_cannot_be_read_or_is_none(fault, model_folder, tmp_path):
    reward = {"type": "reward_model", "name": "judge"}
    message = fault(rewards=[{**reward, "path": str(tmp_path / "none")}])
    assert "rewards.0: reward 'judge': " in message
    assert "none': no such folder" in message
    (tmp_path / "empty").mkdir()
    message = fault(rewards=[{**reward, "path": str(tmp_path / "empty")}])
    assert "rewards.0: reward 'judge': cannot read the configuration of" in message
    message = fault(rewards=[{**reward, "path": str(model_folder)}])
    assert (
        f"rewards.0: reward 'judge': {str(model_folder)!r} has 2 labels; a reward model has one, its score" in message
    )


def test_code_that_the_kernel_cannot_hold_is_warned_of(check, write_rows, monkeypatch):
    write_rows([{"prompt": f"w{i}", "tests": "assert f(1)"} for i in range(8)])
    held = Protection("own", network=False, processes=True, files=True, environment=True, disk=True)
    monkeypatch.setattr(reward_checks, "protection", lambda: held)
    (warning,) = check(rewards=[{"type": "code"}]).warnings
    assert warning.startswith("rewards.0: code that the policy writes can reach the network here")


def test_scoring_that_outlasts_its_own_call_is_refused(check):
    with pytest.raises(ValueError, match=r"scoring\.timeout_s \(300\) must be below timeouts\.call_s \(100\)"):
        check(timeouts={"call_s": 100})


def test_what_gpus_cannot_hold_is_refused_before_anything_starts(fault, check, monkeypatch):
    """An engine at 0.85 of an L40S leaves 7 GB, too little for a learner whose batches have 16 million tokens."""
    monkeypatch.setattr("rlhfless.prepare.machine.local_node", lambda _: Node("", "here", 8, 8, "l40s", 1, 1))
    parts = {
        "placement": {"mode": "colocated", "turns": False},
        "learner": {"dtype": "bfloat16", "micro_batch_tokens": 2**24, "gradient_checkpointing": False},
        "generation": {"max_tokens": 16, "engine": {"gpu_memory_fraction": 0.85}},
    }
    message = fault(**parts, model=check.model | {"dtype": "bfloat16"})
    assert "placement: 1 x l40s do not hold the run: l40s: " in message
    assert "it fits with learner.micro_batch_tokens: " in message
    assert "model.dtype: float32 on l40s" in fault(**parts, model=check.model | {"dtype": "float32"})


# -- what this machine does not hold


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr("rlhfless.prepare.machine.local_node", lambda _: Node("", "this machine", 2, 2))
    for module in ("preflight", "resolve"):
        monkeypatch.setattr(f"rlhfless.planning.{module}.host_memory_bytes", lambda: 24 << 30)


def test_processes_that_memory_does_not_hold_are_refused(fault, two_cores):
    message = fault(
        scaling={"generation": {"min_actors": 9, "max_actors": 64}},
        scoring={"workers": 4000},
    )
    assert (
        "scaling.generation.max_actors: 64 x at least 1 GiB (for its KV cache) is 64 GiB, and this machine has"
        in message
    )
    assert "24.0 GiB\n    set it to at most 24" in message
    assert "scoring.workers: 4000 x at least 0.0625 GiB" in message


def test_more_processes_than_cores_are_a_warning(check, two_cores):
    warnings = "\n".join(
        check(
            scaling={"generation": {"min_actors": 3, "max_actors": 9}},
            scoring={"workers": 30},
            optimizer={"learning_rate": 0.5},
        ).warnings
    )
    assert "scaling.generation.min_actors: 3 actors share 2 core(s)" in warnings
    assert "scaling.generation.max_actors: 9 actors share 2 core(s)" in warnings
    assert "scoring.workers: 30 workers share 2 core(s)" in warnings
    assert "optimizer.learning_rate: 0.5 moves each weight" in warnings
    assert check().warnings == ()


def test_a_learning_rate_of_a_billion_is_refused():
    for rate in (1e9, 1.1):
        with pytest.raises(ValueError, match="less than or equal to 1"):
            RunSpec.model_validate(
                {
                    "model": {"path": "m"},
                    "prompts": {"path": "p"},
                    "rewards": [{"type": "exact_match"}],
                    "optimizer": {"learning_rate": rate},
                }
            )


def test_a_folder_without_room_for_the_weights_is_found(check, fault, monkeypatch):
    """Docker gives a container 64 MB of shared memory."""
    free = os.statvfs_result((4096, 4096, 4, 4, 4, 100, 100, 100, 0, 255))
    monkeypatch.setattr("os.statvfs", lambda _: free)
    message = fault()
    assert "weights.folder: '/dev/shm' has 0.0156 MiB free, and up to 3 versions of the weights of " in message
    assert "--shm-size" in message


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        ("eval/exact_mach", ["'eval/exact_mach' is no metric of this run", "did you mean `eval/exact_match`?"]),
        ("eval/exact_match_pass@4", ["no metric of this run", "did you mean `eval/exact_match_pass@2`?"]),
        ("reward/length_penalty", ["no metric of this run"]),
        ("loss_mean", ["no metric of this run"]),
    ],
)
def test_the_metric_of_the_best_checkpoint_is_one_of_the_run(fault, check, write_rows, metric, told):
    held_out = write_rows([{"prompt": "w20", "answer": 1}], "test.jsonl")
    parts = {"evaluation": {"samples_per_prompt": 4, "pass_at": [2], "sets": [{"name": "a", "path": str(held_out)}]}}
    check(**parts, checkpoint={"best": {"metric": "eval/a/exact_match_pass@2"}})
    parts["prompts"] = {"path": str(write_rows([{"prompt": f"w{i}", "answer": i} for i in range(8)], "t.jsonl"))}
    parts["prompts"]["held_out"] = {"path": str(held_out)}
    check(**parts, checkpoint={"best": {"metric": "eval/exact_match_greedy", "mode": "max"}})
    message = fault(**parts, checkpoint={"best": {"metric": metric}})
    for text in ("checkpoint.best.metric", *told):
        assert text in message


@pytest.mark.parametrize(
    ("run_type", "metric", "told"),
    [
        ("sft", "eval/loss", ["is measured on held-out data, and this run has none", "demonstrations.held_out"]),
        ("dpo", "eval/preference_accuracy", ["is measured on held-out data", "preferences.held_out"]),
        ("sft", "preference_accuracy", ["is no metric of this run"]),
    ],
)
def test_the_best_checkpoint_of_written_responses_needs_a_figure_of_the_run(check, write_rows, run_type, metric, told):
    row = {"response": " w2", "chosen": " w2", "rejected": " w3"}
    rows = write_rows([row | {"prompt": f"w{i}"} for i in range(4)], "written.jsonl")
    section = "demonstrations" if run_type == "sft" else "preferences"
    spec = {"type": run_type, "model": check.model, section: {"path": str(rows)}, "prompts_per_step": 4}
    with pytest.raises(InputError) as caught:
        preflight(RunSpec.model_validate(spec | {"checkpoint": {"best": {"metric": metric}}}))
    for text in ("checkpoint.best.metric", *told):
        assert text in str(caught.value)


@pytest.mark.parametrize("run_type", ["rlhf", "sft", "reward_model", "dpo"])
def test_the_smallest_spec_of_each_type_can_start(check, write_rows, run_type):
    row = {"prompt": "w1", "response": " w2", "chosen": " w2", "rejected": " w3"}
    rows = write_rows([row | {"prompt": f"w{i}"} for i in range(4)], "written.jsonl")
    section = {"rlhf": "prompts", "sft": "demonstrations"}.get(run_type, "preferences")
    smallest = {"type": run_type, "model": check.model, section: {"path": str(rows)}, "prompts_per_step": 4}
    if run_type == "rlhf":
        smallest |= {"rewards": [{"type": "regex", "pattern": "w"}]}
    assert len(preflight(RunSpec.model_validate(smallest)).train) == 4
    with_held_out = smallest | {section: {"path": str(rows), "held_out": {"fraction": 0.5}}, "prompts_per_step": 2}
    prepared = preflight(RunSpec.model_validate(with_held_out))
    assert len(prepared.held_out) == 2


def test_a_set_with_fewer_prompts_than_its_share_of_a_step_is_refused(fault, write_rows):
    few = write_rows([{"prompt": "w1", "answer": 1}], "few.jsonl")
    many = write_rows([{"prompt": f"w{i}", "answer": i} for i in range(9)], "many.jsonl")
    mixture = [{"name": "few", "path": str(few)}, {"name": "many", "path": str(many)}]
    message = fault(prompts={"mixture": mixture})
    assert "prompts.mixture.0.weight: 1, so a step has up to 3 of its 4 prompts, and it has 1" in message


def test_a_reward_is_checked_with_the_prompts_of_its_sets(check, fault, write_rows):
    plain = write_rows([{"prompt": f"w{i}"} for i in range(4)], "plain.jsonl")
    answered = write_rows([{"prompt": f"w{i}", "answer": i} for i in range(4)], "answered.jsonl")
    prompts = {"mixture": [{"name": "a", "path": str(answered)}, {"name": "b", "path": str(plain)}]}
    penalty = {"type": "length_penalty", "free_tokens": 4, "max_tokens": 8}
    check(prompts=prompts, rewards=[{"type": "exact_match", "sets": ["a"]}, penalty])
    assert "answer" in fault(prompts=prompts, rewards=[{"type": "exact_match"}, penalty])
