"""A reward behind HTTP, with a server in this process."""

import http.server
import json
import threading
import time

import pytest

from fakes.reward_samples import samples_of
from rlhfless.rewards import checker
from rlhfless.rewards import http as http_reward
from rlhfless.spec import HttpSpec


@pytest.fixture
def server(monkeypatch):
    """Answers what its list `replies` says, in order and the last for ever; keeps requests in `seen`."""
    monkeypatch.setattr(http_reward, "FIRST_PAUSE_S", 0.01)

    class Judge(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            listener.seen.append((self.headers.get("Authorization"), body["samples"]))
            reply = listener.replies.pop(0) if len(listener.replies) > 1 else listener.replies[0]
            status, answer = reply(body["samples"])
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_):
            pass

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    listener.replies, listener.seen = [lengths], []
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    yield listener
    listener.shutdown()
    listener.server_close()


def lengths(samples):
    return 200, {"scores": [len(sample["response"]) for sample in samples]}


def status(code):
    return lambda _: (code, {"error": "busy"})


def answer(value):
    return lambda _: (200, value)


def spec(server, **options):
    return HttpSpec(type="http", url=f"http://127.0.0.1:{server.server_port}/score", **options)


async def failures(scored, spec, count=1):
    return [score.failures.get("http") for score in await scored([spec], samples_of(*["x"] * count))]


async def test_samples_go_out_in_batches_and_numbers_come_back_in_order(server, scored, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    scores = await scored(
        [spec(server, batch_size=2, token_env="JUDGE_TOKEN")], samples_of("a", "bb", "ccc", answer="x")
    )
    assert [score.parts["http"] for score in scores] == [1.0, 2.0, 3.0]
    assert sorted(len(samples) for _, samples in server.seen) == [1, 2]
    token, samples = server.seen[0]
    assert token == "Bearer secret"
    assert samples[0] == {
        "prompt": "the prompt",
        "response": samples[0]["response"],
        "response_tokens": len(samples[0]["response"]),
        "finish_reason": "length",
        "prompt_id": "p-1",
        "sample_index": samples[0]["sample_index"],
        "columns": {"answer": "x"},
    }


async def test_a_busy_server_is_asked_again(server, scored):
    server.replies[:0] = [status(503), status(429)]
    assert await failures(scored, spec(server)) == [None]
    assert len(server.seen) == 3


async def test_a_server_that_stays_busy_fails_the_batch_after_its_retries(server, scored):
    server.replies[:] = [status(500)]
    (cause,) = await failures(scored, spec(server, retries=1))
    assert "status 500" in cause
    assert "(2 attempts)" in cause
    assert len(server.seen) == 2


async def test_a_refusal_is_not_repeated(server, scored):
    server.replies[:] = [status(404)]
    (cause,) = await failures(scored, spec(server))
    assert "status 404" in cause
    assert len(server.seen) == 1


async def test_null_and_nan_mark_their_sample_only(server, scored):
    server.replies[:] = [answer({"scores": [1, None, "2"]})]
    good, null, text = await failures(scored, spec(server), 3)
    assert good is None
    assert "answered 'None', not a finite number" in null
    assert "not a finite number" in text


async def test_numbers_that_are_huge_mark_their_sample_only(server, scored):
    server.replies[:] = [answer({"scores": [1, -1e308, 10**400]})]
    good, huge, no_float = await failures(scored, spec(server), 3)
    assert good is None
    assert huge == "'http' gave -1e+308, beyond the range from -1e+09 to 1e+09"
    assert "not a finite number" in no_float


@pytest.mark.parametrize("wrong", [{"scores": [1]}, {"score": 1}, [1, 2]])
async def test_an_answer_of_another_form_is_explained(server, scored, wrong):
    server.replies[:] = [answer(wrong)]
    assert all("with 2 numbers is needed" in cause for cause in await failures(scored, spec(server), 2))


async def test_no_answer_and_no_connection_are_waited_for_so_long(server, scored):
    def slow(samples):
        time.sleep(1)
        return lengths(samples)

    server.replies[:] = [slow]
    (cause,) = await failures(scored, spec(server, timeout_s=0.1, retries=1))
    assert "no answer within timeout_s (0.1 s) (2 attempts)" in cause
    (cause,) = await failures(scored, HttpSpec(type="http", url="http://127.0.0.1:9/", retries=0))
    assert "ConnectError" in cause


def test_a_token_that_is_not_there_is_found_before_the_run(server):
    assert checker(spec(server, token_env="NO_SUCH_TOKEN"), None).problems([]) == [
        "the environment variable 'NO_SUCH_TOKEN' is not set"
    ]


async def test_a_failure_shows_no_secrets(scored):
    spec = HttpSpec(type="http", url="http://127.0.0.1:9/?token=hunter2", retries=0)
    (score,) = await scored([spec], samples_of("x"))
    assert score.failures["http"].startswith("http://127.0.0.1:9/?token=*** ConnectError")
