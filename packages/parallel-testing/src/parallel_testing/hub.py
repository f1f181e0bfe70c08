"""A Hub of our own on loopback: the real client creates, commits, tags and downloads against it.

    with HubServer() as hub:
        api = HfApi(endpoint=hub.endpoint, token=hub.token)

Set `HF_HUB_DISABLE_XET=1` before huggingface_hub is imported, or uploads look for a content server.
Everything lives in memory.
"""

from __future__ import annotations

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import urlsplit

from parallel_testing.hub_routes import Reply, answer
from parallel_testing.hub_state import Blob as Blob
from parallel_testing.hub_state import Commit as Commit
from parallel_testing.hub_state import Fault as Fault
from parallel_testing.hub_state import HubState, Request
from parallel_testing.hub_state import Repo as Repo
from parallel_testing.hub_state import User as User
from parallel_testing.hub_state import card_errors as card_errors

MAX_WAIT_S = 300.0
"""Longest wait for the event of a fault, so that a test that forgets it ends all the same."""
REQUEST_S = 30.0
"""Longest pause inside of one request."""


class HubServer(HubState):
    """The state with a server in front of it, which runs inside of a `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> HubServer:
        # Port 0: the system picks a free one, so suites run side by side.
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        # The end waits for the threads of all connections, or the leak check would find them.
        self._server.daemon_threads = False
        self._server.block_on_close = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """Variables for a child process that takes this server for the Hub."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": self.token,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            # A proxy of the machine cannot reach a server on loopback.
            "NO_PROXY": "127.0.0.1",
        }


def _handler(hub: HubState) -> type[BaseHTTPRequestHandler]:
    """The request handler of one server."""

    class Handler(BaseHTTPRequestHandler):
        # The client keeps its connections open, as with the real Hub; HTTP/1.0 would close each.
        protocol_version = "HTTP/1.1"
        server_version = "LocalHub/1"
        timeout: ClassVar[float] = 0.5  # idle connections are let go, so that the server can end

        def log_message(self, format: str, *args: object) -> None:
            """Tests read `requests` instead."""

        def handle_any(self) -> None:
            path = urlsplit(self.path).path
            # A request is under way now: the short time of idle connections is not for it.
            self.connection.settimeout(REQUEST_S)
            body = self._body()
            hub.requests.append(Request(self.command, path))
            fault = hub.take_fault(self.command, path)
            if fault is not None and (fault.delay_s or fault.until is not None):
                time.sleep(fault.delay_s)
                if fault.until is not None:
                    fault.until.wait(MAX_WAIT_S)
                fault = None
            # A fault with `after` does its work first: the client loses the answer alone.
            reply = None
            if fault is None or fault.after:
                reply = answer(hub, self.command, path, self.headers, body)
            if fault is not None and fault.drop:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if fault is not None:
                reply = Reply(b'{"error": "injected"}', fault.status, fault.headers)
            assert reply is not None
            self._send(reply)
            self.connection.settimeout(self.timeout)

        do_GET = do_HEAD = do_POST = do_PUT = handle_any

        def _body(self) -> bytes:
            # A client that streams a body need not know its length; the base class does not decode
            # chunks.
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        def _send(self, reply: Reply) -> None:
            try:
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                # The client asks by HEAD for size and ETag before it downloads.
                if self.command != "HEAD":
                    self.wfile.write(reply.body)
            except OSError:
                self.close_connection = True  # the client gave up waiting

    return Handler
