"""BoundedProtocol: uvicorn's HTTP protocol with limits on connections and on unfinished headers.

ASGI apps run once the headers of a request are complete, so all that precedes them is limited here.
"""

import asyncio
import collections
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from jaxspec.server.http.access import network_of
from jaxspec.server.http.errors import ApiError
from jaxspec.server.options import ServerOptions

_FRAMING = 8  # bytes around each byte of a body, in chunks of one byte
_LINGER = 2.0  # seconds for which a refused client may go on sending, so that it reads the answer


class ConnectionCounts:
    """Numbers of the open connections of a process, in all and by `network_of` their address."""

    def __init__(self, most: int, most_per_address: int):
        self._most, self._most_per_address = most, most_per_address
        self._counts = collections.Counter[str]()

    def add(self, network: str) -> bool:
        """Count a connection and return True, unless there are too many."""
        if self._counts.total() >= self._most or self._counts[network] >= self._most_per_address:
            return False
        self._counts[network] += 1
        return True

    def remove(self, network: str) -> None:
        self._counts[network] -= 1
        if not self._counts[network]:
            del self._counts[network]


class BoundedProtocol(HttpToolsProtocol):
    """A connection with limits on its headers, and on the number of connections beside it."""

    def __init__(
        self, *args: Any, options: ServerOptions, counts: ConnectionCounts, **kwargs: Any
    ) -> None:
        """`counts` is shared by the connections of a server; the others are uvicorn's arguments."""
        super().__init__(*args, **kwargs)
        self._max_header_bytes = options.h11_max_incomplete_event_size
        self._header_seconds, self._counts = options.header_timeout, counts
        self._network: str | None = None  # where the connection is counted, while it is
        self._is_refused, self._reads_headers = False, True
        self._num_header_bytes = 0
        self._num_body_bytes = 0  # of the received part
        self._num_other_bytes = 0  # received since the headers, beyond `_FRAMING` per body byte
        # Limits the time of headers, of a body that no one reads, or after a refusal.
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        network = network_of(self.client[0] if self.client else "")
        if self._counts.add(network):
            self._network = network
            self._start_timer()
        else:
            self._refuse(503, "The server has too many open connections. Close some, or retry.")
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._network is not None:
            self._counts.remove(self._network)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and not (self._is_refused or self.transport.is_closing()):
            part = data[: self._max_header_bytes - self._num_header_bytes]
            if not part:
                self._refuse(
                    431,
                    f"The headers of a request must have at most {self._max_header_bytes:,} bytes, "
                    "and these have more. Send less, or start the server with a larger "
                    "--h11-max-incomplete-event-size.",
                )
                return
            if self._reads_headers:
                self._start_timer()
                self._num_header_bytes += len(part)
            data, self._num_body_bytes = data[len(part) :], 0
            super().data_received(part)
            if not self._reads_headers:
                self._check_framing(len(part))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reads_headers:  # trailers are dropped
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_timer()  # of a request that follows another one within the same data

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._reads_headers, self._num_header_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._reads_headers, self._num_other_bytes = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self._reads_headers and self._timer is None:
            # The rest of the body is dropped, and the client may send it for as long as headers.
            self._timer = self.loop.call_later(self._header_seconds, self.transport.close)

    def _check_framing(self, num_bytes: int) -> None:
        """Close the connection if what surrounds a body's chunks is longer than headers may be."""
        others = num_bytes - (1 + _FRAMING) * self._num_body_bytes
        self._num_other_bytes = max(0, self._num_other_bytes + others)
        if self._num_other_bytes > 2 * self._max_header_bytes:  # the first part has headers, too
            self._is_refused = True
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._header_seconds, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self._is_answering:  # the client reads an answer, and has begun another request
            self._start_timer()
        elif self._num_header_bytes:
            self._refuse(
                408,
                f"The headers of a request must be there within {self._header_seconds:g} seconds, "
                "and these are not. Send them again.",
            )
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error, drop all that the client sends, and close the connection soon."""
        self._stop_timer()
        self._is_refused = True
        if self._is_answering:
            self.transport.close()
            return
        response = ApiError(status, message, headers={"connection": "close"}).response("")
        head = [b"%b: %b\r\n" % header for header in response.raw_headers]
        self.transport.write(b"".join((STATUS_LINE[status], *head, b"\r\n", response.body)))
        self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER, self.transport.close)
