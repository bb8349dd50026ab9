"""A stand-in for a judge, to try the protocol without a model: `python stand_in.py 8001`.

It answers POST /v1/chat/completions as an OpenAI-compatible server does. Its verdict is 10 if the response is
the reference answer, else 0.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class StandIn(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        texts = dict(re.findall(r"<<<(\w+) [0-9a-f]+\n(.*?)\n[0-9a-f]+>>>", question, re.DOTALL))
        right = texts["response"].strip() == texts["answer"]
        verdict = json.dumps({"reason": "equal" if right else "not equal", "score": 10 if right else 0})
        answer = {"choices": [{"message": {"role": "assistant", "content": verdict}, "finish_reason": "stop"}]}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), StandIn).serve_forever()
