"""A small server of OpenAI's API: `python fake_server.py PORT [--company | --fails] [--ours] [--refuses-penalties]`.

It answers with a hash of what is asked.
With `--company`, an answer that others shared the server with has another last word: each waits for company, until
another request comes or a time is over. With `--fails` there are no answers, with `--refuses-penalties` none to a
request with a penalty. With `--ours` it says that it is Outrider's.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECONDS = 0.3  # that a request waits for company: longer than the pauses between requests that are made together


class Handler(BaseHTTPRequestHandler):
    alone: threading.Event | None = None  # of the request that waits for company
    lock = threading.Lock()
    changes_in_company = False

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "fake", "owned_by": "outrider" if "--ours" in sys.argv else "nobody"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "--fails" in sys.argv or ("--refuses-penalties" in sys.argv and "frequency_penalty" in asked):
            self.send_error(500)
            return
        shared = self.changes_in_company and self.has_company()
        words = hashlib.sha256(f"{asked['prompt']}{asked.get('seed')}".encode()).hexdigest()
        text = f"{words[:8]} {words[8:12]}" + (" ..." if shared else "")
        choice: dict[str, Any] = {"text": text, "finish_reason": "length", "logprobs": None}
        if asked.get("stream"):
            self.write(f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n")
        else:
            self.reply({"choices": [choice]})

    def has_company(self) -> bool:
        """Join the request that waits for company, or wait for one that joins."""
        with Handler.lock:
            if Handler.alone is not None:
                Handler.alone.set()
                Handler.alone = None
                return True
            joined = Handler.alone = threading.Event()
        joined.wait(SECONDS)
        with Handler.lock:
            if Handler.alone is joined:
                Handler.alone = None
        return joined.is_set()

    def reply(self, value: object) -> None:
        self.write(json.dumps(value))

    def write(self, body: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


if __name__ == "__main__":
    Handler.changes_in_company = "--company" in sys.argv
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
