"""The command line, typed as a user would."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
import yaml
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from fakes.tiny_models import QWEN_05B
from rlhfless.cli import main, service
from rlhfless.planning import preflight
from rlhfless.prediction.run_plan import planned
from rlhfless.spec.load import load_spec
from rlhfless.util.errors import UserError


@pytest.fixture
def spec(model_folder, write_rows, tmp_path):
    """A spec file that is right, with paths relative to it."""
    write_rows([{"prompt": f"w{i}", "answer": i} for i in range(8)])
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{path: {model_folder.name}}}\n"
        "prompts: {path: train.jsonl}\n"
        "rewards:\n- type: exact_match\n"
        "generation: {max_tokens: 16}\n"
        "prompts_per_step: 4\n"
    )
    return path


def invoke(*arguments):
    return CliRunner().invoke(main.app, [str(argument) for argument in arguments])


def test_validate_prints_what_the_user_set(spec, model_folder):
    result = invoke("validate", spec, "--set", "steps=3", "--set", "generation.top_p=0.9")
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout) == {
        "model": {"path": str(model_folder)},
        "prompts": {"path": str(spec.parent / "train.jsonl")},
        "rewards": [{"type": "exact_match"}],
        "generation": {"max_tokens": 16, "top_p": 0.9},
        "prompts_per_step": 4,
        "steps": 3,
    }
    assert "warning: generation: top_p 0.9" in result.stderr
    assert "ok: 8 training and 0 held-out prompts, sequences of up to 17 tokens" in result.stderr
    assert ", learner.micro_batch_tokens 8192" in result.stderr, "decided for the user"


@pytest.mark.parametrize("option", ["--all", "--defaults"])
def test_validate_prints_every_default_on_request(spec, option):
    result = invoke("validate", spec, option)
    resolved = yaml.safe_load(result.stdout)
    assert resolved["optimizer"]["learning_rate"] == 1e-6
    assert {value for key, value in resolved["timeouts"].items() if key in ("start_s", "call_s")} == {600}


def test_validate_imports_no_ray_and_no_engine(spec):
    """They take seconds, and nothing is started."""
    code = (
        "import sys; from rlhfless.cli.main import app; app(sys.argv[1:], standalone_mode=False); "
        "print(sorted({'ray', 'vllm', 'numba'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "validate", str(spec)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_broken_model_is_one_message_and_exit_code_2(spec, model_folder):
    file = model_folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, file)
    result = invoke("validate", spec)
    assert result.exit_code == 2
    assert result.stderr == (
        "the run cannot start: 1 problem\n"
        "- model.path: model.safetensors lacks tensor 'model.layers.0.mlp.up_proj.weight' [8, 8], which "
        "LlamaForCausalLM needs\n"
        "    fetch the model again from where it came from\n"
    )


def test_a_mistyped_key_is_one_message_and_exit_code_2(spec):
    result = invoke("validate", spec, "--set", "rewards.0.wieght=2")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        f"{spec}: 1 problem\n"
        "- rewards.0.wieght (--set rewards.0.wieght=2): unknown key\n"
        "    did you mean `weight`? Valid keys here: name, weight, sets, type, answer_field, answer_pattern, strip, "
        "ignore_case\n"
    )


def test_what_preflight_finds_is_one_message_and_exit_code_2(spec):
    result = invoke("validate", spec, "--set", "prompts_per_step=9", "--set", "rewards.0.answer_field=solution")
    assert result.exit_code == 2
    assert result.stderr.startswith("the run cannot start: 2 problems\n")
    assert "column `solution` is missing" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("place", [0, 3])
def test_debug_shows_the_traceback_wherever_it_stands(spec, place):
    arguments = ["validate", spec, "--set=steps=0"]
    arguments.insert(place, "--debug")
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert "steps (--set steps=0)" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("correct it"), 2, "correct it\n"),
        (KeyError("x"), 1, "unexpected KeyError: 'x'\nRun it again with --debug for the traceback.\n"),
        (typer.Exit(7), 7, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(spec, monkeypatch, error, code, text):
    def fail(_):
        raise error

    monkeypatch.setattr(preflight, "preflight", fail)
    result = invoke("validate", spec)
    assert (result.exit_code, result.stderr) == (code, text)


def test_a_mistyped_command_names_the_nearest():
    result = invoke("vlidate", "x")
    assert result.exit_code == 2
    assert "validate" in result.stderr


def test_schema_and_version():
    assert json.loads(invoke("schema").stdout)["title"] == "RunSpec"
    assert invoke("--version").stdout.startswith("rlhfless 0.")


def test_models_tiny_reports_progress_and_says_where_it_wrote(tmp_path, monkeypatch):
    from rlhfless import bundled

    def build(folder, *, seed, recipe, on_progress):
        on_progress(SimpleNamespace(step=1, steps=2, loss=0.5))
        assert (seed, recipe) == (3, bundled.Recipe())
        return bundled.BundledPaths(folder)

    monkeypatch.setattr(bundled, "build", build, raising=False)
    result = invoke("models", "tiny", "--out", tmp_path, "--seed", 3)
    assert result.exit_code == 0, result.output
    assert result.stdout.replace("\n", "") == f"{tmp_path} holds model/, train.jsonl and heldout.jsonl"


def test_help_imports_nothing_heavy():
    program = (
        "import sys\nfrom rlhfless.cli import main\n"
        "heavy = ('torch', 'transformers', 'ray', 'vllm', 'datasets')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "[]"


@pytest.fixture
def interrupted(spec, tmp_path):
    """The folder of a run with a checkpoint of step 3."""
    from rlhfless.records.checkpoints import NOTES_FILE, CheckpointNotes, Checkpoints
    from rlhfless.spec.load import load_spec, resolved_yaml

    folder = tmp_path / "runs" / "run-1"
    checkpoint = Path(Checkpoints(folder / "checkpoints", 1).location(3))
    checkpoint.mkdir(parents=True)
    notes = CheckpointNotes("run-1", 1, 3, "ab", None, {})
    (checkpoint / NOTES_FILE).write_text(json.dumps(notes.as_json()))
    (folder / "spec.yaml").write_text(resolved_yaml(load_spec(spec)))
    return folder


def test_a_folder_that_is_no_run_cannot_be_resumed(tmp_path):
    result = invoke("run", "--resume", tmp_path)
    assert result.exit_code == 2
    assert "is no run: it has no spec.yaml" in result.stderr
    assert "runs/demo-..." in result.stderr


def test_a_run_needs_a_folder_that_is_valid_unicode(spec, interrupted, tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    result = invoke("run", spec, "--set", f"output={folder}")
    assert result.exit_code == 2
    assert f"1 problem\n- output (--set output={tmp_path}/caf\\udce9): '" in result.stderr
    interrupted.rename(folder)
    result = invoke("run", "--resume", folder, "--set", "steps=4")
    assert result.exit_code == 2
    assert f"- output: '{tmp_path}/caf\\udce9' is not valid Unicode" in result.stderr
    assert "rename the folder" in result.stderr
    monkeypatch.chdir(folder)
    assert "is not valid Unicode" in invoke("run", spec).stderr


def test_neither_spec_nor_run_is_a_usage_error():
    result = invoke("run")
    assert result.exit_code == 2
    assert "name a spec, or a run with --resume" in result.stderr


def test_a_finished_run_has_nothing_to_resume(interrupted):
    for name in (interrupted, interrupted / "checkpoints" / "step-000003"):
        result = invoke("run", "--resume", name, "--set", "steps=3")
        assert result.exit_code == 2
        assert "- steps: 3, and the run has done 3: nothing is left to do" in result.stderr


def test_another_spec_is_refused_by_name(interrupted):
    before = (interrupted / "spec.yaml").read_text()
    result = invoke("run", "--resume", interrupted, "--set", "seed=5", "--set", "generation.max_tokens=7")
    assert result.exit_code == 2
    assert "- seed: 5, but the run started with 0" in result.stderr
    assert "- generation.max_tokens: 7, but the run started with 16" in result.stderr
    assert (interrupted / "spec.yaml").read_text() == before


@pytest.fixture
def begun(spec, monkeypatch, tmp_path):
    """The folder of a run that `rlhfless run` began with a linear rate, and that has saved step 3 of 10."""
    from rlhfless.cli import run
    from rlhfless.records.checkpoints import NOTES_FILE, CheckpointNotes, Checkpoints

    attempts = []
    monkeypatch.setattr(
        run, "_run", lambda prepared, folder, changed: attempts.append((prepared.spec, changed, folder))
    )
    monkeypatch.chdir(tmp_path)
    result = invoke("run", spec, "--set", "steps=10", "--set", "optimizer.rate_schedule=linear")
    assert result.exit_code == 0, result.output
    folder = attempts.pop()[2]
    checkpoint = Path(Checkpoints(folder / "checkpoints", 1).location(3))
    checkpoint.mkdir(parents=True)
    (checkpoint / NOTES_FILE).write_text(json.dumps(CheckpointNotes("run-1", 1, 3, "ab", None, {}).as_json()))
    return folder, attempts


def test_a_resumed_elastic_run_has_its_sizes_again(begun, spec):
    _, attempts = begun
    assert invoke("run", spec, "--set", "placement.devices={min: 1, max: 2}").exit_code == 0
    first, _, folder = attempts.pop()
    assert first.placement.devices == min(2, len(os.sched_getaffinity(0)))
    kept = load_spec(folder / "spec.yaml").placement.size_range
    assert (kept.min, kept.max) == (1, 2)
    assert invoke("run", "--resume", folder, "--set", "placement.devices={min: 1, max: 1}").exit_code == 0
    assert attempts.pop()[0].placement.devices == 1, "with the devices that it may have then"
    assert invoke("run", "--resume", folder).exit_code == 0


def test_a_resume_takes_no_edited_data_without_a_word(begun, spec):
    folder, attempts = begun
    assert invoke("run", "--resume", folder).exit_code == 0
    assert attempts.pop()[1] == []
    data = spec.parent / "train.jsonl"
    data.write_text(data.read_text().replace('"answer": 5', '"answer": 6'))
    result = invoke("run", "--resume", folder)
    assert result.exit_code == 2
    assert "- prompts.path: " in result.stderr
    assert "of 8 rows 1 changed, 0 removed, 0 added; the first is row 6" in result.stderr
    assert attempts == []
    assert invoke("run", "--resume", folder, "--allow-changed", "model").exit_code == 2
    assert invoke("run", "--resume", folder, "--allow-changed", "data").exit_code == 0
    assert "the change was allowed" in str(attempts.pop()[1])
    assert invoke("run", "--resume", folder).exit_code == 0


def test_other_steps_of_a_falling_rate_are_refused_until_they_are_allowed(begun):
    folder, attempts = begun
    before = (folder / "spec.yaml").read_text()
    result = invoke("run", "--resume", folder, "--set", "steps=20")
    assert result.exit_code == 2
    # 1e-6 times 1 - 2 / 10, 1 - 3 / 20 and 1 - 3 / 10
    assert "step 3 ended with a rate of 8e-07, and step 4 would continue with 8.5e-07 instead of 7e-07" in result.stderr
    assert (folder / "spec.yaml").read_text() == before
    assert invoke("run", "--resume", folder, "--set", "steps=20", "--allow-changed", "schedule").exit_code == 0
    assert attempts.pop()[0].steps == 20
    assert invoke("run", "--resume", folder).exit_code == 0


@pytest.mark.parametrize(("word", "told"), [("dta", "did you mean `data`?"), ("", "is not one of data, model")])
def test_what_may_change_is_named_by_its_word(begun, spec, word, told):
    result = invoke("run", "--resume", begun[0], "--allow-changed", word)
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.replace("│", " ").split())
    assert "it needs --resume RUN" in invoke("run", spec, "--allow-changed", "data").stderr


@pytest.fixture
def sized(tmp_path):
    """A spec whose model is a config alone: a plan needs no weights and no prompts."""
    (tmp_path / "sized").mkdir()
    (tmp_path / "sized" / "config.json").write_text(json.dumps(QWEN_05B))
    file = tmp_path / "sized.yaml"
    values = {"model": {"path": "sized"}, "prompts": {"path": "p.jsonl"}, "rewards": [{"type": "exact_match"}]}
    file.write_text(yaml.safe_dump(values))
    return file


def test_a_plan_that_fits(sized):
    result = invoke("plan", sized, "--devices", "2xh100")
    assert re.search(r"Take these devices with schedule \w+: [\d:]+ for \$[\d.,]+\.", " ".join(result.stdout.split()))
    assert result.exit_code == 0, result.output
    assert "0.494 B parameters on 2 x h100, colocated" in result.stdout
    assert "nearest change" not in result.stdout
    found = json.loads(invoke("plan", sized, "--devices", "2xh100", "--json").stdout)
    assert (found["fits"], found["device"], found["nearest_change"]) == (True, {"kind": "h100", "count": 2}, None)


def test_a_plan_shows_time_and_cost_as_the_service_does_and_no_line_twice(sized):
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 512}
    (sized.parent / "sized" / "config.json").write_text(json.dumps(QWEN_05B | small))
    asked = [sized, "--devices", "2xcpu-core"]
    found = json.loads(invoke("plan", *asked, "--json").stdout)
    spec = load_spec(sized).model_dump(mode="json")
    service_plan = planned({"spec": spec, "present": {"cpu-core": 2}})
    assert found["predicted"] == service_plan["chosen"]["predicted"]
    assert found["lengths"] == service_plan["lengths"]
    text = invoke("plan", *asked).stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert f"{found['predicted']['step_s']:,.2f}" in text
    assert "response lengths: assumed: a median of" in " ".join(lines)
    for phase in ("generate", "learn", "publish"):
        assert sum(f" {phase} " in f" {line} " for line in lines) == 1, text


def test_a_plan_that_does_not_fit_names_the_nearest_change(sized):
    closed = ("generation.engine.gpu_memory_fraction=0.95", "placement.mode=colocated", "placement.turns=false")
    told = [word for each in closed for word in ("--set", each)]
    result = invoke("plan", sized, "--devices", "1xl40s", *told)
    assert result.exit_code == 1
    assert "refused: l40s: " in result.stdout
    assert "nearest change that fits: generation.engine.gpu_memory_fraction: 0.6" in result.stdout


@pytest.mark.parametrize("key", ["model.dtype", "learner.dtype"])
def test_a_plan_tells_of_a_format_that_a_run_is_refused_for(sized, key):
    asked = ["plan", sized, "--devices", "8xh100", "--set", f"{key}=float32"]
    result = invoke(*asked)
    assert result.exit_code == 1
    assert f"refused: {key}: float32 on h100" in result.stdout
    assert "placement.float32_on_gpus: true" in result.stdout
    assert json.loads(invoke(*asked, "--json").stdout)["fits"] is False
    assert invoke(*asked, "--set", "placement.float32_on_gpus=true").exit_code == 0


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("8 of them", "'8 of them' names no devices\n    write it as 8xh100"),
        ("8xh1000", "did you mean `h100`?"),
        ("4097xh100", "'4097xh100': more than 4,096 devices\n    ask for fewer"),
        ("9" * 5000 + "xh100", "names no devices"),
    ],
)
def test_devices_that_are_none(sized, devices, message):
    result = invoke("plan", sized, "--devices", devices)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("package", "what"),
    [
        ("mine.rewards", None),
        ("numpy.linalg", None),
        ("mien", "there is no package 'mien'"),
        ("mine.others", "there is no package 'mine.others'"),
        ("mine.rewards.deeper", "there is no package 'mine.rewards.deeper'"),
        ("mine/rewards.py", "is not the name of a package"),
        ("mine.rewards:score", "is not the name of a package"),
        ("", "is not the name of a package"),
    ],
)
def test_code_that_is_not_there_is_refused_when_the_service_starts(tmp_path, monkeypatch, package, what):
    """Nothing is imported, and a service elsewhere has packages of its own."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "mine" / "rewards.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr(service, "_detached", started.append)
    result = invoke("up", "--detach", "--code", package)
    if what is None:
        assert [settings.code for settings in started] == [(package,)], result.output
    else:
        assert result.exit_code == 2
        assert "--code" in result.output
        assert what in " ".join(result.output.replace("│", " ").split())
        assert not started
    if package == "mien":
        assert invoke("up", "--detach", "--code", package, "--ray-address", "http://head:8265").exit_code == 0


def test_devices_are_compared_and_the_chosen_ones_written(sized, tmp_path):
    result = invoke(
        "plan", sized, "--compare", "--devices", "2xh100", "--devices", "1xl40s", "--out", tmp_path / "chosen"
    )
    assert result.exit_code == 0, result.output
    placement = load_spec(tmp_path / "chosen" / "run.yaml").placement
    assert f"1 * {placement.devices} x {placement.kind}" in result.stdout
    assert f"Take row 1, {placement.devices} x {placement.kind}, " in result.stdout
    (group,) = yaml.safe_load((tmp_path / "chosen" / "values.yaml").read_text())["ray"]["gpuGroups"]
    assert (group["kind"], group["gpus"] * group["maxNodes"]) == (placement.kind, placement.devices)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (["--devices", "8xh100", "--devices", "1xl40s"], "multiple devices require --compare"),
        (["--devices", "8xh100", "--out", "there"], "requires --compare"),
        (["--compare", "--devices", "1xl40s", "--out", "there", "--row", "9"], "9 is no row that fits"),
        (["--compare", "--quantization", "fp4"], "'fp4': Input should be 'off'"),
        (["--compare", "--share-prefixes", "perhaps"], "'perhaps': Input should be"),
        (["--devices", "8xh100", "--share-prefixes", "true"], "requires --compare"),
        (["--compare", "--measured", "report.json"], "a report is of one kind of device"),
    ],
)
def test_what_only_a_comparison_takes_is_refused_elsewhere(sized, told, said):
    result = invoke("plan", sized, *told)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_devices_are_listed_with_sources(tmp_path):
    rows = {row["kind"]: row for row in json.loads(invoke("devices", "--json").stdout)}
    assert rows["h100"]["flops_per_s"]["value"] == 989e12
    marked = [line.split()[0] for line in invoke("devices").stdout.splitlines() if line.split()[1:2] == ["*"]]
    assert marked == [kind for kind, row in rows.items() if row["no_engine"]]
    assert all(row["price"] is None or row["price"]["source"] for row in rows.values())
    book = tmp_path / "prices.yaml"
    price = {"source": "ours", "as_of": "2026-11-01"}
    kinds = [{"kind": "h100", "usd_per_hour": 1.5, **price}, {"kind": "cpu-core", "usd_per_hour": 0.01, **price}]
    book.write_text(yaml.safe_dump({"cpu_kind": "cpu-core", "devices": kinds}))
    assert " 1.50 2026-11 " in invoke("devices", "--prices", book).stdout
