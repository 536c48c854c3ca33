"""A stand-in for ``rollmux serve`` on an inherited socket; run as a process by test_run.py.

``fake_daemon.py BOARD PLAN --fd N``: tells the board (a datagram socket) all that happens to it,
and behaves as the JSON object PLAN says: ``exit`` (code, at once), ``gate`` (before it accepts,
wait until somebody opens this FIFO for writing; only if it is there), ``ready``, ``clean`` and
``release`` (status, message), ``flush`` (answers, the last one for ever), ``deaf`` (ignores
SIGTERM), ``key`` (bearer token it wants).
"""

import json
import os
import signal
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

board_path, plan_text, *_, fd_text = sys.argv[1:]
plan = json.loads(plan_text)
board = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
board.connect(board_path)


def tell(what: str, **more: object) -> None:
    board.send(json.dumps({"who": "daemon", "what": what, "pid": os.getpid(), **more}).encode())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        ready = plan.get("ready", True)
        if plan.get("key") and self.headers["Authorization"] != f"Bearer {plan['key']}":
            self.answer(401, {"error": {"message": "no key"}})
        elif self.path == "/health":
            self.answer(200 if ready else 503, {})
        elif self.path == "/proxy/status":
            replicas = [{"id": "a", "url": "http://a:8000", "state": "ready", "last_error": None}]
            if not ready:
                replicas.append(
                    {"id": "b", "url": "http://b:8000", "state": "down", "last_error": "refused"}
                )
            self.answer(200, {"replicas": replicas})
        else:
            self.answer(200, {"pid": os.getpid()})

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/proxy/flush":
            tell(self.path, sent=sent)
            looks = plan["flush"]
            self.answer(200, looks.pop(0) if len(looks) > 1 else looks[0])
            return
        status, message = plan.get(self.path.removeprefix("/proxy/"), [200, ""])
        tell(self.path, sent=sent)
        self.answer(status, {"error": {"message": message}} if status != 200 else {})


def stop(*_: object) -> None:
    tell("SIGTERM")
    if not plan.get("deaf"):
        os._exit(0)


signal.signal(signal.SIGTERM, stop)
tell("started", args=sys.argv[1:], env=dict(os.environ))
if "exit" in plan:
    sys.exit(plan["exit"])
if os.path.exists(plan.get("gate", "")):
    with open(plan["gate"]) as gate:
        gate.read()
listener = socket.socket(fileno=int(fd_text))
server = ThreadingHTTPServer(listener.getsockname(), Handler, bind_and_activate=False)
server.socket.close()
server.socket = listener
server.serve_forever()
