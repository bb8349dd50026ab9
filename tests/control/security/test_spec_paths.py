"""What a spec may name: files below roots, hub names, code of allowed packages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlhfless.control.errors import ApiError
from rlhfless.control.settings import ServiceSettings
from rlhfless.control.spec_admission import posted_spec
from rlhfless.spec import RunSpec
from rlhfless.spec.base import locations
from rlhfless.spec.explain import models


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    (tmp_path / "root").mkdir()
    return ServiceSettings(data=str(tmp_path / "data"), roots=(str(tmp_path / "root"), "s3://ours/"))


def wrong(settings: ServiceSettings, **changes: Any) -> set[str]:
    values: dict[str, Any] = {
        "model": {"path": "Qwen/Qwen3-0.6B"},
        "prompts": {"path": "openai/gsm8k:main"},
        "rewards": [{"type": "exact_match"}],
    }
    for key, value in changes.items():
        values[key] = values[key] | value if isinstance(value, dict) and key in values else value
    return wrong_places(values, settings)


def wrong_places(values: dict[str, Any], settings: ServiceSettings) -> set[str]:
    try:
        posted_spec(values, settings)
    except ApiError as error:
        return {problem.where for problem in error.problems}
    return set()


def test_hub_names_and_files_below_roots_are_fine(settings: ServiceSettings, tmp_path: Path) -> None:
    assert wrong(settings) == set()
    assert wrong(settings, model={"path": str(tmp_path / "root" / "model")}) == set()
    assert wrong(settings, model={"path": f"{settings.runs}/earlier/checkpoints/step-000010"}) == set()
    assert wrong(settings, checkpoint={"url": "s3://ours/runs"}) == set()


@pytest.mark.parametrize(
    "path",
    [
        "/etc",
        "{root}/../data/service.sqlite",
        "{root}/link/passwd",
        "../root/model",
        "~/model",
        "./model",
        "{data}/driver.json",
        "{data}/runs/earlier/driver.json",
        "{data}/runs/earlier/checkpoints/../driver.json",
        "s3://ours/%2e%2e/theirs/x",
        "file:///etc",
        "simplecache::file:///etc/passwd",
        "s3://theirs/x",
        "s3://ours/../theirs/x",
        "s3://ours-too/x",
    ],
)
def test_no_path_leaves_the_roots(settings: ServiceSettings, tmp_path: Path, path: str) -> None:
    (tmp_path / "root" / "link").symlink_to("/etc")
    path = path.format(root=tmp_path / "root", data=settings.folder)
    assert wrong(settings, model={"path": path}) == {"model.path"}
    assert wrong(settings, model={"tokenizer": path}) == {"model.tokenizer"}
    assert wrong(settings, prompts={"path": path}) == {"prompts.path"}
    assert wrong(settings, prompts={"held_out": {"path": path}}) == {"prompts.held_out.path"}
    assert wrong(settings, rewards=[{"type": "reward_model", "path": path}]) == {"rewards.0.path"}
    assert wrong(settings, scaling={"prices": path}) == {"scaling.prices"}
    assert wrong(settings, checkpoint={"url": path}) == {"checkpoint.url"}
    assert wrong(settings, weights={"folder": path}) == {"weights.folder"}


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_the_working_directory_has_is_no_name_of_the_hub(
    settings: ServiceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "secret.jsonl").write_text("{}")
    (tmp_path / "cwd" / "owner").mkdir(parents=True)
    here = tmp_path / "cwd" / "owner" / "name"
    here.write_text("{}") if kind == "file" else here.symlink_to(tmp_path / "secret.jsonl")
    monkeypatch.chdir(tmp_path / "cwd")
    assert wrong(settings, model={"path": "owner/name"}) == {"model.path"}
    assert wrong(settings, model={"tokenizer": "owner/name"}) == {"model.tokenizer"}
    assert wrong(settings, prompts={"path": "owner/name"}) == {"prompts.path"}
    assert wrong(settings, prompts={"path": "owner/other"}) == set()


def test_the_data_folder_is_closed_although_it_is_below_a_root(settings: ServiceSettings, tmp_path: Path) -> None:
    wide = settings.model_copy(update={"roots": (str(tmp_path),)})
    assert wrong(wide, prompts={"path": str(tmp_path / "root" / "a.jsonl")}) == set()
    assert wrong(wide, model={"path": f"{settings.runs}/earlier/checkpoints/step-000010"}) == set()
    for path in ("service.sqlite", "runs/earlier/driver.json"):
        assert wrong(wide, prompts={"path": str(settings.folder / path)}) == {"prompts.path"}


def test_without_the_hub_names_are_refused(settings: ServiceSettings) -> None:
    closed = settings.model_copy(update={"allow_hub": False})
    assert wrong(closed) == {"model.path", "prompts.path"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"type": "process", "command": ["sh", "-c", "id"]}, "command"),
        ({"type": "mcp", "servers": ["http://169.254.169.254/mcp"]}, "servers"),
        ({"type": "openenv", "url": "http://169.254.169.254"}, "url"),
        ({"type": "gymnasium", "id": "os:Game-v1"}, "id"),
    ],
)
def test_environments_name_no_programs_hosts_and_modules(
    settings: ServiceSettings, environment: dict[str, Any], place: str
) -> None:
    assert wrong(settings, environment=environment) == {f"environment.{place}"}
    assert wrong(settings, environment={"type": "gymnasium", "id": "FrozenLake-v1"}) == set()


def test_code_is_refused_before_it_is_imported(settings: ServiceSettings, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "trap.py").write_text("import pathlib\npathlib.Path(__file__).with_suffix('.sprung').touch()")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert wrong(settings, algorithm={"type": "trap:Algorithm"}) == {"algorithm.type"}
    assert wrong(settings, algorithm="trap:Algorithm") == {"algorithm"}
    assert wrong(settings, schedule="trap:Schedule") == {"schedule"}
    assert wrong(settings, scaling={"policy": {"type": "trap:Policy"}}) == {"scaling.policy.type"}
    assert wrong(settings, rewards=[{"type": "python", "target": "os:system"}]) == {"rewards.0.target"}
    assert not (tmp_path / "trap.sprung").exists()
    allowed = settings.model_copy(update={"code": ("mine",)})
    assert wrong(allowed, rewards=[{"type": "python", "target": "mine.rewards:score"}]) == set()
    assert wrong(allowed, rewards=[{"type": "python", "target": "minefield:score"}]) == {"rewards.0.target"}


def test_what_a_service_does_not_leave_to_a_spec(settings: ServiceSettings) -> None:
    assert wrong(settings, model={"trust_remote_code": True}) == {"model.trust_remote_code"}
    assert wrong(settings, generation={"engine": {"extra": {"load_format": "x"}}}) == {"generation.engine.extra"}
    http = {"type": "http", "url": "http://rewards.example/score"}
    assert wrong(settings, rewards=[http | {"token_env": "AWS_SECRET_ACCESS_KEY"}]) == {"rewards.0.token_env"}
    assert wrong(settings, rewards=[http | {"token_env": "RLHFLESS_REWARD_TOKEN"}]) == set()
    assert wrong(settings, scoring={"http_hosts": ["127.0.0.1:22"]}) == {"scoring.http_hosts"}


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        parts = models(field.annotation)
        starred = "*." if get_origin(field.annotation) in (tuple, list) else ""
        if not parts:
            yield f"{prefix}{name}", field
        for part in parts:
            yield from fields(part, f"{prefix}{name}.{starred}")


def test_every_field_that_sounds_like_a_file_is_marked() -> None:
    """A new field of the spec that names a file gets a mark of rlhfless/spec/base.py, or is entered here with its
    reason. It sounds like one by its name, or by what its docstring says of its text."""
    no_files = {
        "rewards.*.url",  # guarded when it is asked
        "teachers.*.url",  # as well
        "environment.url",  # no service takes it
        "output",  # the service's own
        "generation.engine.data_parallel_url",
        "name",  # part of a folder's name, of letters, digits and hyphens
    }
    names = {"path", "url", "folder", "tokenizer", "prices", "file", "output"}
    sounds = {
        place
        for place, field in fields(RunSpec)
        if place.rpartition(".")[2] in names
        or (str in texts_of(field.annotation) and re.search(r"\b(file|folder|hub)\b", field.description or "", re.I))
    }
    splits = {place for place in sounds if place.endswith(".split")}
    assert sounds - no_files - splits == set(locations(RunSpec))
    assert os.sep == "/"


def texts_of(annotation: Any) -> set[Any]:
    """`str` if an annotation allows any text, looking through optionals."""
    return {annotation} if annotation is str else {each for part in get_args(annotation) for each in texts_of(part)}


@pytest.mark.parametrize("field", [field for field in locations(RunSpec) if field.startswith(("dem", "pref"))])
def test_files_of_written_responses_are_below_the_roots(settings: ServiceSettings, tmp_path: Path, field: str) -> None:
    section, _, key = field.partition(".")
    values: dict[str, Any] = {
        "type": "sft" if section == "demonstrations" else "dpo",
        "model": {"path": "Qwen/Qwen3-0.6B"},
        section: {"path": "trl-lib/Capybara"},
    }
    for folder, refused in ((tmp_path, {field}), (tmp_path / "root", set())):
        file = str(folder / "rows.jsonl")
        written = {"path": file} if key == "path" else {"held_out": {"path": file}}
        values[section] |= written
        assert wrong_places(values, settings) == refused


def test_what_a_critic_starts_from_is_below_the_roots(settings: ServiceSettings, tmp_path: Path) -> None:
    ppo = {"algorithm": "ppo"}
    assert wrong(settings, **ppo, critic={"model": str(tmp_path / "critic")}) == {"critic.model"}
    assert wrong(settings, **ppo, critic={"model": str(tmp_path / "root" / "critic")}) == set()
    assert wrong(settings, **ppo, critic={"model": "owner/critic"}) == set()
    assert wrong(settings, **ppo, critic={"model": "policy"}) == set()
    closed = settings.model_copy(update={"allow_hub": False})
    assert wrong(closed, **ppo, critic={"model": "policy"}) == {"model.path", "prompts.path"}
    assert wrong(closed, **ppo, critic={"model": "owner/critic"}) == {"model.path", "prompts.path", "critic.model"}
