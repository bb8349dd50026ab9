"""The section `environment`: programs, MCP servers and user code; what cannot work is refused."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhfless.control.settings import ServiceSettings
from rlhfless.control.spec_admission import code_problems
from rlhfless.environments.contract import EnvironmentSource
from rlhfless.spec import RunSpec
from rlhfless.spec.load import load_spec

RUN: dict[str, Any] = {"model": {"path": "a/b"}, "prompts": {"path": "c/d"}, "steps": 2}


def spec(environment: dict[str, Any], **changes: Any) -> RunSpec:
    return RunSpec.model_validate({**RUN, "rewards": [], "environment": environment, **changes})


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"type": "proces"}, "did you mean `process`?"),
        ({"type": "process"}, "`command` is missing, and type process needs it; write, for example, command: [python"),
        ({"type": "mcp"}, "`servers` is missing, and type mcp needs it"),
        (
            {"type": "my_env:Guess", "command": ["a"]},
            "`command` belongs to type process, and the type is 'my_env:Guess'",
        ),
        ({"type": "mcp", "servers": ["http://a"], "folder": "/tmp"}, "`folder` belongs to type process"),
        ({"type": "mcp", "servers": ["tools.py"]}, "'tools.py' is no URL; write `https://...`, or {command"),
        ({"type": "mcp", "servers": ["https://me:word@host/"]}, "a password in a URL would show in logs"),
        ({"type": "mcp", "servers": [{"command": "python", "arguments": []}]}, "Extra inputs are not permitted"),
        ({"type": "process", "command": "python agent.py"}, "valid tuple"),
        ({"type": "mcp", "servers": ["http://host/mcp"]}, "rewards is empty, and MCP servers give no reward"),
    ],
)
def test_what_cannot_work_is_refused(environment, words):
    with pytest.raises(ValidationError) as error:
        spec(environment)
    assert words in str(error.value)


def test_sets_with_a_column_of_their_own_are_refused_with_an_environment():
    mixture = [{"name": "one", "path": "c/d"}, {"name": "two", "path": "c/d", "prompt_field": "question"}]
    with pytest.raises(ValidationError) as error:
        spec({"type": "my_env:Guess"}, prompts={"mixture": mixture})
    assert "prompts.mixture.1.prompt_field is 'question'" in str(error.value)
    assert "rename the column of the set 'two'" in str(error.value)
    same = [mixture[0], {**mixture[1], "prompt_field": "prompt"}]
    assert spec({"type": "my_env:Guess"}, prompts={"mixture": same}).environment is not None


def test_folders_count_from_the_spec(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(
        "model: {path: a/b}\nprompts: {path: c/d}\nsteps: 2\n"
        "environment: {type: process, command: [python, agent.py, '{question}'], folder: .}\n"
        "rewards: [{type: math}]\n"
    )
    environment = load_spec(tmp_path / "run.yaml").environment
    assert environment is not None
    source = EnvironmentSource.of(environment)
    assert source == EnvironmentSource("process", ("python", "agent.py", "{question}"), str(tmp_path))
    (tmp_path / "tools").mkdir()
    (tmp_path / "mcp.yaml").write_text(
        "model: {path: a/b}\nprompts: {path: c/d}\nsteps: 2\nrewards: [{type: math}]\n"
        "environment: {type: mcp, servers: [{command: python, cwd: tools}]}\n"
    )
    with_servers = load_spec(tmp_path / "mcp.yaml").environment
    assert with_servers is not None
    assert with_servers.servers[0].parameters == {"command": "python", "cwd": str(tmp_path / "tools")}


def test_servers_are_given_as_the_client_takes_them():
    servers = [{"command": "python", "args": ["tools.py"], "env": {"A": "1"}}, "https://host/mcp"]
    source = EnvironmentSource.of(spec({"type": "mcp", "servers": servers}, rewards=[{"type": "math"}]).environment)
    assert source.servers == ({"command": "python", "args": ("tools.py",), "env": {"A": "1"}}, "https://host/mcp")


def test_a_service_runs_no_code_and_no_program_that_a_spec_names():
    values = {"environment": {"type": "os:system", "command": ["sh"], "servers": [{"command": "sh"}]}}
    refused = code_problems(values, ServiceSettings(code=()))
    assert [problem.where for problem in refused] == ["environment.type", "environment.command", "environment.servers"]
    allowed = ServiceSettings(code=("os",))
    assert [problem.where for problem in code_problems(values, allowed)] == [
        "environment.command",
        "environment.servers",
    ]
