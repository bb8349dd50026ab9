"""The example rewards do what the page says."""

import http.server
import json
import threading

import pytest

from rlhfless.records import FinishReason
from rlhfless.rewards import RewardSample
from rlhfless.spec import PythonRewardSpec


@pytest.fixture
def judge_url():
    """A judge that scores a response by its length."""

    class Judge(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"score": len(body["response"])}).encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/judge"
    server.shutdown()
    server.server_close()


async def test_one_of_each_kind(judge_url, request, monkeypatch, scored):
    monkeypatch.chdir(request.config.rootpath)
    specs = [
        PythonRewardSpec(type="python", name="closeness", target="examples.rewards:closeness"),
        PythonRewardSpec(type="python", name="variety", target="examples.rewards:variety", batch=True),
        PythonRewardSpec(type="python", name="judge", target="examples.rewards:judge", kwargs={"url": judge_url}),
    ]
    responses = ["it is 42", "it is 43", "it is 42", "no idea"]
    samples = [
        RewardSample("p", text, 3, FinishReason.STOP, {"answer": "42"}, "p", i) for i, text in enumerate(responses)
    ]
    scores = await scored(specs, samples)
    assert [score.parts["closeness"] for score in scores] == [1.0, 0.5, 1.0, 0.0]
    assert [score.parts["variety"] for score in scores] == [1 - 1 / 3, 1.0, 1 - 1 / 3, 1.0]
    assert [score.parts["judge"] for score in scores] == [8.0, 8.0, 8.0, 7.0]
