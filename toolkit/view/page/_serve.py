"""The page's server: loopback only, under an address that nobody can guess, for this machine's own host names.

The address holds a random part, since other users of the machine reach its loopback interface too. A request with
another Host (a name rebound to 127.0.0.1) or from another Origin is refused, and the page may load nothing from
anywhere else (Content-Security-Policy).
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from typing import Any

from toolkit.view.page._content import Content
from toolkit.view.page._jobs import Jobs
from traces.errors import GradreelError

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'"
)


class Server:
    """A server bound to `port` (0: any free one), not yet serving. A busy port is a GradreelError."""

    def __init__(self, content: Content, port: int = 0) -> None:
        from werkzeug.serving import WSGIRequestHandler, make_server

        from toolkit.view.page._app import build

        class Silent(WSGIRequestHandler):
            """Requests are no news."""

            def log(self, type: str, message: str, *args: Any) -> None:
                logging.getLogger("gradreel.view").debug(message, *args)

        self._socket = _bound(port)
        self.port = self._socket.getsockname()[1]
        prefix = f"/{secrets.token_urlsafe(12)}/"
        self.url = f"http://{HOST}:{self.port}{prefix}"
        self._jobs = Jobs(content)
        self.app = build(content, self._jobs, prefix)
        _guard(self.app.server, self.port)
        self._server = make_server(
            HOST, self.port, self.app.server, threaded=True, request_handler=Silent, fd=self._socket.fileno()
        )
        self._thread: threading.Thread | None = None

    def serve(self) -> None:
        """Serve until Ctrl-C."""
        try:
            self._server.serve_forever()
        finally:
            self.close()

    def start(self) -> None:
        """Serve on a thread, for a notebook."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="gradreel view server")
            self._thread.start()

    def close(self) -> None:
        """Stop serving; harmless when done twice."""
        if self._thread is not None and self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
        self._socket.close()
        self._jobs.stop()


def _bound(port: int) -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((HOST, port))
        found.listen(128)
    except OSError as error:
        found.close()
        raise GradreelError(
            f"cannot serve on port {port} of {HOST}: {error.strerror or error}; choose another --port"
        ) from None
    return found


def _guard(flask: Any, port: int) -> None:
    """Refuse foreign hosts and origins, and send the headers that keep the page to itself."""
    from flask import abort, request

    flask.config["TRUSTED_HOSTS"] = list(_NAMES)
    hosts = {f"{name}:{port}" for name in _NAMES}
    origins = {f"http://{host}" for host in hosts}

    @flask.before_request
    def refuse_foreign() -> None:
        if request.headers.get("Host", "") not in hosts or request.headers.get("Origin") not in {None, *origins}:
            abort(403)

    @flask.after_request
    def add_headers(response: Any) -> Any:
        response.headers["Content-Security-Policy"] = _POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response
