"""A server of S3 on this machine that can be told to fail: it refuses, loses and cuts off answers.

It needs `moto`, `flask` and `flask-cors`; whoever imports this skips where they are missing.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

REFUSE, LOSE, CUT = "refuse", "lose", "cut"
_ERROR = b"<Error><Code>InternalError</Code><Message>try again</Message></Error>"


class Server:
    """Answer requests, but for a share of them."""

    def __init__(self) -> None:
        self.address = ""
        """Where it is reached."""
        self.failing = 0.0
        """The share of requests that fail."""
        self.failed: list[str] = []
        """In which way each of them did."""
        self.requests = 0
        """How many came."""
        self._inner = DomainDispatcherApplication(create_backend_app)
        self._kinds: tuple[str, ...] = ()
        self._random = random.Random(7)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def fail(self, share: float, *kinds: str) -> Iterator[None]:
        """Have a share of the requests fail for a while, in these ways, or in any."""
        self._random.seed(7)
        self.failing, self.failed, self.requests = share, [], 0
        self._kinds = kinds or (REFUSE, LOSE, CUT)
        try:
            yield
        finally:
            self.failing = 0.0

    def make_bucket(self, name: str) -> None:
        """Begin an empty bucket."""
        request = urllib.request.Request(f"{self.address}/{name}", method="PUT")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(request, timeout=30).close()

    def put(self, path: str, data: bytes) -> None:
        """Put an object there, as another program would."""
        request = urllib.request.Request(f"{self.address}/{path}", data=data, method="PUT")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(request, timeout=30).close()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answer a request of WSGI."""
        kind = self._choose(environ["REQUEST_METHOD"])
        if kind == REFUSE:
            # What was sent is read, or the one who sends it finds the connection broken.
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if kind == LOSE:
            for _ in self._inner(environ, lambda *_, **__: None):
                pass
        if kind in (REFUSE, LOSE):
            start_response("500 Internal Server Error", [("Content-Length", str(len(_ERROR)))])
            return [_ERROR]
        body: Iterable[bytes] = self._inner(environ, start_response)
        if kind == CUT:
            whole = b"".join(body)
            # The head has promised more; the connection ends here.
            return [whole[: len(whole) // 2]]
        return body

    def _choose(self, method: str) -> str | None:
        with self._lock:
            self.requests += 1
            if self._random.random() >= self.failing:
                return None
            kind = self._random.choice(self._kinds)
            if kind == CUT and method != "GET":
                kind = REFUSE  # there is nothing to cut
            self.failed.append(kind)
            return kind


@contextlib.contextmanager
def run_server() -> Iterator[Server]:
    """Run a server for a while, at a port of this machine that is free."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = Server()
    running = make_server("127.0.0.1", 0, server, threaded=True)
    server.address = f"http://127.0.0.1:{running.server_port}"
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        running.shutdown()
        thread.join()
        running.server_close()
