"""HTTP/1.1 on the trainer's side: uvicorn's protocol, with bounds and words where it has none."""

from __future__ import annotations

import logging
import sys

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from proxy.errors import BadRequest, HeadersTooLarge, ProxyError, error_body

log = logging.getLogger("rollmux")

HEAD_LIMIT_BYTES = 1024 * 1024
"""Past it a head that has no end yet is not read on. A whole one is held against a lower bound
(``app.HEAD_LIMIT_BYTES``), so that whoever is a little over it gets to read why."""


class _Ahead(Exception):
    """A request came before the one in hand was answered."""


class ClientProtocol(HttpToolsProtocol):
    """One client's connection.

    Requests are not taken ahead (RFC 9112, 9.3.2, lets a server close instead): uvicorn 0.54 tells
    only the last of them that the client is gone, and an engine would go on for nobody. The one in
    hand is answered with ``connection: close``, and the client sends the others again.
    """

    _ahead = False
    _in_head = True
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self._ahead:
            return  # read all the same: the end of the connection comes behind it
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        # A body that came along may be most of it; then the head is whole.
        if self._in_head and self._head_bytes > HEAD_LIMIT_BYTES:
            self._refuse(HeadersTooLarge(HEAD_LIMIT_BYTES))

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._ahead = True
            self.cycle.keep_alive = False
            raise _Ahead
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Called while the parser's error is handled."""
        if self._ahead:
            return
        error = sys.exception()
        why = error and (error.__context__ or error)
        self._refuse(BadRequest(f"this is no HTTP/1.1 request ({why or msg})"))

    def _refuse(self, error: ProxyError) -> None:
        if self.transport.is_closing():
            return
        status, headers, body = error_body(error)
        peer = ":".join(map(str, self.client)) if self.client else "a client"
        log.warning("%s answered %d %s: %s", peer, status, error.code, error)
        lines = [STATUS_LINE[status], b"connection: close\r\n"]
        lines += [b"%b: %b\r\n" % header for header in headers]
        self.transport.write(b"".join((*lines, b"\r\n", body)))
        self.transport.close()
