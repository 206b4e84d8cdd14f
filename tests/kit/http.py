"""A small HTTP server for tests of what asks servers."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def serving(answer: Callable[[str, Any], tuple[int, object]]) -> Iterator[str]:
    """The address of a server.

    ``answer`` is called in a thread for each request, with its path and its JSON (None for GET). It
    returns a status and a text, or what JSON can say.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body: Any) -> None:
            status, text = answer(self.path, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write((text if isinstance(text, str) else json.dumps(text)).encode())

        def log_message(self, format: str, *args: object) -> None:
            """No line for each request."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
