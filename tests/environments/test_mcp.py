"""Tools of an MCP server over standard input and output."""

import sys

import pytest

from fakes.local_environments import Says, byte_format, text_of
from rlhfless.chat.messages import Message
from rlhfless.environments.contract import EnvironmentSource
from rlhfless.environments.episode import play_episode
from rlhfless.environments.protocol import EnvironmentFailed
from rlhfless.environments.trajectory import EpisodeLimits, EpisodeTask
from rlhfless.environments.workers import EnvironmentWorkers
from rlhfless.records import EpisodeStatus

SERVER = """
import os
from mcp.server.mcpserver import MCPServer

server = MCPServer("counter")
total = 0

@server.tool()
def add(number: int) -> str:
    "Add to the total."
    global total
    total += number
    return f"total {total}"

@server.tool()
def die() -> str:
    "End the server."
    os._exit(3)

@server.tool()
def refuse() -> str:
    "Raise."
    raise ValueError("not today")

server.run()
"""

ENVIRONMENT = """
from rlhfless.environments.mcp import McpTools

class Counter(McpTools):
    servers = [{{"command": {python!r}, "args": ["server.py"]}}]

    async def reset(self, seed: int, row: dict) -> str:
        await super().reset(seed, row)
        return "Count."

    def reward(self) -> float:
        return 1.0
"""


@pytest.fixture
async def workers(tmp_path, monkeypatch):
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "counter.py").write_text(ENVIRONMENT.format(python=sys.executable))
    monkeypatch.chdir(tmp_path)
    pool = EnvironmentWorkers(EnvironmentSource("counter.py:Counter"), 1, call_s=60.0, memory_mib=2048)
    await pool.start()
    yield pool
    pool.close()


async def test_each_episode_has_a_session_of_its_own(workers):
    for _ in range(2):
        async with workers.session() as session:
            opening = await session.reset(1, {})
            assert [tool["function"]["name"] for tool in opening.tools] == ["add", "die", "refuse"]
            assert opening.tools[0]["function"]["parameters"]["properties"]["number"]["type"] == "integer"
            assert (await session.call(1, "add", {"number": 2})).text == "total 2"
            assert (await session.call(2, "add", {"number": 3})).text == "total 5"
            assert (await session.call(3, "add", {"number": "x"})).outcome == "refused"
            assert (await session.call(4, "ad", {})).outcome == "invalid"
            assert (await session.call(5, "refuse", {})).outcome == "refused"
            assert await session.reward() == 1.0


async def test_a_server_that_ends_is_a_failure_and_no_answer(workers):
    async with workers.session() as session:
        await session.reset(1, {})
        with pytest.raises(EnvironmentFailed, match="`die` raised"):
            await session.call(1, "die", {})
    async with workers.session() as session:
        await session.reset(1, {})
        assert (await session.call(1, "add", {"number": 2})).text == "total 2"


async def test_servers_that_a_spec_names_are_an_environment_without_a_reward(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    source = EnvironmentSource("mcp", servers=({"command": "python", "args": ["server.py"], "cwd": str(tmp_path)},))
    pool = EnvironmentWorkers(source, 1, call_s=60.0, memory_mib=2048)
    try:
        await pool.start()
        assert pool.description.name == "mcp"
        task = EpisodeTask("p", 0, {}, 1, messages=(Message("user", ("Count to 5.",)),))
        call = '<tool_call>{"name": "add", "arguments": {"number": 5}}</tool_call><|im_end|>'
        model = Says([call, "It is 5.<|im_end|>"])
        chat = byte_format([{}])
        episode = await play_episode(task, model, chat, pool, EpisodeLimits(call_s=60.0))
    finally:
        pool.close()
    assert (episode.status, episode.reward, episode.cause) == (EpisodeStatus.DONE, None, "")
    assert [(each.tool, each.answer.text) for each in episode.calls] == [("add", "total 5")]
    assert '"name": "refuse"' in text_of(episode.segments[0].token_ids)
    assert "Count to 5.<|im_end|>" in text_of(episode.segments[0].token_ids)
