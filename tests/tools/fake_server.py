"""A small server of OpenAI's API: `python fake_server.py PORT [--company | --fails]`.

It answers with a hash of what is asked.
With `--company`, an answer that others shared the server with has another last word; with `--fails` there are none.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECONDS = 0.05  # of an answer, so that requests sent together overlap


class Handler(BaseHTTPRequestHandler):
    in_flight, lock = 0, threading.Lock()
    changes_in_company = False

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "fake", "owned_by": "nobody"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "--fails" in sys.argv:
            self.send_error(500)
            return
        with Handler.lock:
            Handler.in_flight += 1
        time.sleep(SECONDS)
        with Handler.lock:
            shared = Handler.in_flight > 1
        time.sleep(SECONDS)
        with Handler.lock:
            Handler.in_flight -= 1
        words = hashlib.sha256(f"{asked['prompt']}{asked.get('seed')}".encode()).hexdigest()
        text = f"{words[:8]} {words[8:12]}" + (" ..." if shared and self.changes_in_company else "")
        choice: dict[str, Any] = {"text": text, "finish_reason": "length", "logprobs": None}
        if asked.get("stream"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n".encode())
        else:
            self.reply({"choices": [choice]})

    def reply(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


if __name__ == "__main__":
    Handler.changes_in_company = "--company" in sys.argv
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
