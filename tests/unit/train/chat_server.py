"""A small OpenAI-compatible server on a real socket, which misbehaves as told."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "tiny"


def reply(content: str, *, ids: list[int] | None = None, finish: str = "stop") -> dict[str, Any]:
    """The body of a completion, with token ids as SGLang gives them."""
    choice: dict[str, Any] = {"message": {"role": "assistant", "content": content}, "finish_reason": finish}
    if ids is not None:
        choice["response_token_ids"] = ids
    return {"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": len(ids or ())}}


def echo(request: dict[str, Any]) -> dict[str, Any]:
    """Answers every prompt with itself; the ids say how long the conversation was."""
    messages = request["messages"]
    return reply(f"re: {messages[-1]['content']}", ids=[len(messages), 7, 2])


class _Http(ThreadingHTTPServer):
    request_queue_size = 256  # the default of 5 resets connections made at the same time
    daemon_threads = True

    def handle_error(self, *_args: Any) -> None:
        """Clients that are killed leave broken connections behind."""


@dataclass
class ChatServer:
    """What the server does, and what it saw.

    Attributes:
        answer: request -> response body; a returned (status, body) is an error; None breaks the connection.
        dies_after: completions given; the next request finds the server gone.
        most_at_once: requests under way at the same time, at most.
    """

    answer: Callable[[dict[str, Any]], Any] = echo
    delay_s: float = 0.0
    dies_after: int | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_answers: int = 0
    most_at_once: int = 0
    _at_once: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _http: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        assert self._http is not None
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def questions(self) -> list[str]:
        return [request["messages"][-1]["content"] for request in self.requests]

    @contextmanager
    def running(self) -> Iterator[ChatServer]:
        self._http = _Http(("127.0.0.1", 0), self._handler())
        thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()
            thread.join()

    def complete(self, request: dict[str, Any]) -> Any:
        with self._lock:
            if self.dies_after is not None and self.num_answers >= self.dies_after:
                return None
            self.requests.append(request)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        time.sleep(self.delay_s)
        response = self.answer(request)
        with self._lock:
            self._at_once -= 1
            self.num_answers += isinstance(response, dict)
        return response

    @property
    def dead(self) -> bool:
        return self.dies_after is not None and self.num_answers >= self.dies_after

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if server.dead:
                    self._break()
                else:
                    self._send(200, {"data": [{"id": MODEL}]})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                response = server.complete(json.loads(body))
                if response is None:
                    self._break()
                else:
                    self._send(*response if isinstance(response, tuple) else (200, response))

            def _send(self, status: int, body: Any) -> None:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def _break(self) -> None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

            def log_message(self, *_args: Any) -> None:
                pass

        return Handler
