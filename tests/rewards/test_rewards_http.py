"""A reward behind HTTP, with a server in this process."""

import datetime
import email.utils
import http.server
import json
import math
import threading
import time
import uuid
from decimal import Decimal

import numpy as np
import pytest

from fakes.builders import samples_of
from rlhfless.records import Prompt
from rlhfless.rewards import checker, endpoint
from rlhfless.spec import HttpSpec
from rlhfless.util.text import parsed_json


@pytest.fixture
def server(monkeypatch):
    """Answers what its list `replies` says, in order and the last for ever; keeps requests in `seen`."""
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.01)

    class Judge(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            listener.seen.append((self.headers.get("Authorization"), body["samples"]))
            reply = listener.replies.pop(0) if len(listener.replies) > 1 else listener.replies[0]
            status, answer, *headers = reply(body["samples"])
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
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


def busy(code, retry_after):
    return lambda _: (code, {"error": "busy"}, ("Retry-After", retry_after))


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
        "transcript": [],
        "sample_index": samples[0]["sample_index"],
        "columns": {"answer": "x"},
    }


async def test_a_busy_server_is_asked_again(server, scored):
    server.replies[:0] = [status(503), status(429)]
    assert await failures(scored, spec(server)) == [None]
    assert len(server.seen) == 3


@pytest.mark.parametrize("code", [429, 503])
@pytest.mark.parametrize(("asked", "least_s"), [("1", 1.0), ("0.3", 0.3), ("0", 0.0)])
async def test_a_wait_that_the_server_asks_for_is_kept(server, scored, monkeypatch, code, asked, least_s):
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 30.0)
    server.replies[:0] = [busy(code, asked)]
    began = time.monotonic()
    assert await failures(scored, spec(server)) == [None]
    assert time.monotonic() - began >= least_s
    assert len(server.seen) == 2


async def test_a_wait_beyond_the_limit_fails_at_once_and_says_so(server, scored):
    server.replies[:] = [busy(429, "3600")]
    (cause,) = await failures(scored, spec(server, timeout_s=5))
    assert "status 429" in cause
    assert "it asks for 3600 s until the next request (Retry-After), and timeout_s allows 5 s" in cause
    assert len(server.seen) == 1


def test_a_wait_may_be_a_date():
    in_a_minute = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=1)
    assert 55 < endpoint.retry_after_s(email.utils.format_datetime(in_a_minute, usegmt=True)) <= 60


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("120", 120),
        (" 7 ", 7),
        ("-5", 0),
        ("1e3", 1000),
        ("inf", 3.2e9),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Wed, 21 Oct 2015 07:28:00", 0),
        ("", None),
        ("soon", None),
        ("nan", None),
        ("Wed, 99 Oct 2015 07:28:00 GMT", None),
    ],
)
def test_retry_after(header, seconds):
    assert endpoint.retry_after_s(header) == seconds


async def test_a_wait_holds_for_the_requests_of_other_batches(server, scored):
    server.replies[:0] = [busy(429, "0.5")]
    began = time.monotonic()
    assert await failures(scored, spec(server, batch_size=1, concurrency=1), 3) == [None] * 3
    assert time.monotonic() - began >= 0.5
    assert len(server.seen) == 4


WHEN = datetime.datetime(2024, 1, 5, 10, 30, tzinfo=datetime.UTC)
COLUMNS = {
    "when": WHEN,
    "day": WHEN.date(),
    "at": WHEN.time(),
    "price": Decimal("42.50"),
    "score": parsed_json("1.50", as_written=True),
    "missing": math.nan,
    "count": np.int64(3),
    "list": np.array([1, 2]),
    "nested": {"a": [{"b": WHEN.date()}, None, True]},
    "id": uuid.UUID(int=5),
}


async def test_columns_are_sent_as_json_has_them(server, scored):
    assert checker(spec(server), None).problems([Prompt("p", (), "", COLUMNS)]) == []
    assert await failures_of(scored, spec(server), COLUMNS) == [None]
    assert server.seen[0][1][0]["columns"] == {
        "when": "2024-01-05T10:30:00+00:00",
        "day": "2024-01-05",
        "at": "10:30:00",
        "price": "42.50",
        "score": 1.5,
        "missing": None,
        "count": 3,
        "list": [1, 2],
        "nested": {"a": [{"b": "2024-01-05"}, None, True]},
        "id": "00000000-0000-0000-0000-000000000005",
    }


async def failures_of(scored, spec, columns):
    return [score.failures.get("http") for score in await scored([spec], samples_of("x", **columns))]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"image": b"PNG"}, "the column `image` holds \"b'PNG'\" (bytes)"),
        ({"a": {"b": [1, {"c": b"x"}]}}, "the column `a.b.1.c` holds"),
        ({"a": datetime.timedelta(1)}, "(a timedelta)"),
        ({"a": {1, 2}}, "(a set)"),
        ({"a": {1: 2}}, "(a mapping)"),
        ({"a": 1 + 2j}, "(a complex)"),
    ],
)
async def test_columns_that_json_cannot_hold_are_refused_before_the_run(server, scored, columns, said):
    prompts = [Prompt("p", (), "", {"answer": 1}), Prompt("q", (), "", columns, where="train.jsonl:2")]
    (problem,) = checker(spec(server), None).problems(prompts)
    assert "columns cannot be sent as JSON in 1 of 2 prompts: train.jsonl:2: the column `" in problem
    assert said in problem
    (cause,) = await failures_of(scored, spec(server), columns)
    assert "the samples cannot be written as JSON: the column" in cause
    assert server.seen == []


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
