"""A teacher's server that is late, busy, wrong, or has other tokens."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fakes.tiny_learner import make_batch
from rlhfless.functions.remote_teacher import RemoteTeacher, TeacherFailed, TeacherServer
from rlhfless.spec import TeacherSpec

WORDS = [f"w{index}" for index in range(40)]


class Tokenizer:
    def get_vocab(self) -> dict[str, int]:
        return {word: token for token, word in enumerate(WORDS)}

    def decode(self, tokens: list[int]) -> str:
        return " ".join(WORDS[token] for token in tokens)


def logprob(token: int, before: int) -> float:
    return -(1 + token + 100 * before) / 1000


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.words = list(WORDS)
        self.faults: list[tuple[int, str]] = []
        """Answers (status, body) given first."""
        self.asked: list[tuple[str, Any]] = []
        self.delay_s = 0.0


class Answers(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "teacher", "max_model_len": 64}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        if self.path == "/detokenize":
            self._answer({"prompt": " ".join(self.server.words[token] for token in body["tokens"])})
            return
        if self.server.faults:
            status, text = self.server.faults.pop()
            self._send(status, text)
            return
        time.sleep(self.server.delay_s)
        tokens = body["prompt"]
        pairs = itertools.pairwise(tokens)
        given = [{str(token): {"logprob": logprob(token, before), "rank": 1}} for before, token in pairs]
        self._answer({"choices": [{"prompt_logprobs": [None, *given]}]})

    def _answer(self, answer: Any) -> None:
        self._send(200, json.dumps(answer))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def teacher(server: Server, timeout_s: float = 300.0) -> TeacherServer:
    return TeacherServer(TeacherSpec(name="big", url=server.url, concurrency=2, timeout_s=timeout_s))


async def test_each_generated_token_gets_its_own_logprob(server: Server) -> None:
    client, batch = teacher(server), make_batch()
    await client.check(Tokenizer(), longest=63)
    values = await client.logprobs(batch)
    before = np.concatenate([[0], batch.tokens[:-1]])
    expected = [logprob(token, last) for token, last in zip(batch.tokens, before, strict=True)]
    np.testing.assert_allclose(values, np.where(batch.response_mask, expected, 0), rtol=1e-6)
    (body,) = {
        (body["model"], body["max_tokens"], body["prompt_logprobs"])
        for path, body in server.asked
        if path == "/v1/completions"
    }
    assert body == ("teacher", 1, 0)


async def test_each_conversation_of_a_sequence_is_read_by_itself(server: Server) -> None:
    client, batch = teacher(server), make_batch()
    start = int(batch.starts[-1])
    positions = batch.positions.copy()
    positions[start + 1 :] -= 1  # the second token of the last prompt begins another conversation
    await client.check(Tokenizer(), longest=63)
    await client.logprobs(dataclasses.replace(batch, positions=positions))
    asked = [body["prompt"] for path, body in server.asked if path == "/v1/completions"]
    assert batch.tokens[start + 1 :].tolist() in asked
    assert batch.tokens[start:].tolist() not in asked


FAULTS = [
    (503, ""),
    (429, "busy"),
    (200, "{half a jso"),
    (200, json.dumps({"choices": [{"prompt_logprobs": [None]}]})),
    (200, json.dumps({"choices": [{"prompt_logprobs": None}]})),
    (200, "[]"),
]


async def test_a_server_that_recovers_is_asked_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfless.rewards.endpoint.FIRST_PAUSE_S", 0.001)
    client, batch = teacher(server), make_batch()
    await client.check(Tokenizer(), longest=63)
    server.faults = list(FAULTS)
    values = await client.logprobs(batch)
    assert not server.faults
    assert (values[batch.response_mask] < 0).all()


async def test_a_server_that_stays_broken_ends_the_run_and_gives_no_value(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr("rlhfless.rewards.endpoint.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr("rlhfless.rewards.endpoint.FIRST_PAUSE_S", 0.001)
    client = teacher(server, timeout_s=60.0)
    await client.check(Tokenizer(), longest=63)
    server.faults = [(500, "broken")] * 100_000
    with pytest.raises(TeacherFailed, match=r"teacher 'big' at http.*status 500: 'broken'.*resume the run"):
        await client.logprobs(make_batch())
    # More than one: a request of the batch before may still reach the server.
    server.faults = [(400, "no such model")] * 100
    with pytest.raises(TeacherFailed, match="status 400: 'no such model'"):
        await client.logprobs(make_batch())


async def test_a_turn_to_ask_is_waited_for_beyond_the_time_of_a_request(server: Server) -> None:
    server.delay_s = 0.2
    batch = make_batch()
    assert batch.sequences > 2 * 2, "more than two rounds of requests"
    client = teacher(server, timeout_s=0.5)
    await client.check(Tokenizer(), longest=63)
    assert (await client.logprobs(batch))[batch.response_mask].all()


async def test_a_token_that_is_not_there_is_told_before_the_first_request(server: Server) -> None:
    spec = TeacherSpec(name="big", url=server.url, token_env="TOKEN_THAT_IS_NOT_SET")
    with pytest.raises(TeacherFailed, match="variable 'TOKEN_THAT_IS_NOT_SET' is not set"):
        await TeacherServer(spec).check(Tokenizer(), longest=63)
    assert not server.asked


async def test_other_tokens_are_refused_with_the_first_one(server: Server) -> None:
    server.words[7], server.words[9] = server.words[9], server.words[7]
    with pytest.raises(TeacherFailed, match="its token 7 is 'w9', and the policy's is 'w7'"):
        await teacher(server).check(Tokenizer(), longest=63)


async def test_a_short_context_is_refused(server: Server) -> None:
    with pytest.raises(TeacherFailed, match="reads up to 63 tokens, and prompt and response may have 80"):
        await teacher(server).check(Tokenizer(), longest=80)


def test_the_deployment_is_the_one_that_the_declaration_names() -> None:
    from rlhfless.functions.kinds import teacher_kinds
    from rlhfless.spec import RunSpec
    from rlhfless.spec.imports import load_target

    values = {"model": {"path": "x"}, "prompts": {"path": "p"}, "algorithm": "distill"}
    run = RunSpec.model_validate(values | {"teachers": [{"name": "big", "url": "http://teacher:8000"}]})
    (kind,) = teacher_kinds(run)
    assert load_target(kind.deployment) is RemoteTeacher
