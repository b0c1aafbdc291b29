"""The events of a streamed Anthropic message, of the pieces that parsers find.

https://docs.anthropic.com/en/api/messages-streaming. Each event is its name and its JSON.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.server.parsers import Piece
from jaxspec.server.translate import anthropic
from jaxspec.server.translate.fields import Json

Event = tuple[str, Json]

PING: Event = ("ping", {"type": "ping"})
"""What may come at any time, to keep a connection open."""


class MessageEvents:
    """Makes the events of one message: `begin`, then `add` any number of times, then `end`."""

    def __init__(self, model: str) -> None:
        """`model`: the name that the message bears."""
        self._model = model
        self._index = -1  # of the block
        self._open: tuple[str, int] | None = None  # what the block is made of: kind and call

    def begin(self, used: Mapping[str, Any]) -> list[Event]:
        """The first events; `used`: the chat's usage so far."""
        message = anthropic.empty_message(self._model, anthropic.usage(used))
        return [("message_start", {"type": "message_start", "message": message}), PING]

    def add(self, pieces: Iterable[Piece]) -> list[Event]:
        """The events of further pieces."""
        events: list[Event] = []
        for piece in pieces:
            source = "tool" if piece.kind.startswith("tool") else piece.kind, piece.index
            if source != self._open:
                events += self._close()
                events.append(self._begin_block(piece))
                self._open = source
            if piece.kind != "tool_name":
                events.append(self._block_event("delta", delta=_delta(piece)))
        return events

    def end(
        self, finish_reason: str, stop_reason: str | int | None, used: Mapping[str, Any]
    ) -> list[Event]:
        """The last events, of a chat's `finish_reason`, vLLM's `stop_reason` and the usage."""
        delta = anthropic.stop(finish_reason, stop_reason)
        told = {"type": "message_delta", "delta": delta, "usage": anthropic.usage(used)}
        return [*self._close(), ("message_delta", told), ("message_stop", {"type": "message_stop"})]

    def _begin_block(self, piece: Piece) -> Event:
        self._index += 1
        if piece.kind == "reasoning":
            block = anthropic.thinking_block("")
        elif piece.kind == "content":
            block = {"type": "text", "text": ""}
        else:
            block = anthropic.tool_block(piece.text, {})
        return self._block_event("start", content_block=block)

    def _close(self) -> list[Event]:
        is_open, self._open = self._open is not None, None
        return [self._block_event("stop")] if is_open else []

    def _block_event(self, step: str, **told: Json) -> Event:
        name = f"content_block_{step}"
        return name, {"type": name, "index": self._index, **told}


def failed(status: int, message: str) -> Event:
    """The event of an error in a stream."""
    return "error", anthropic.error(status, message)


def _delta(piece: Piece) -> Json:
    if piece.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": piece.text}
    if piece.kind == "content":
        return {"type": "text_delta", "text": piece.text}
    return {"type": "input_json_delta", "partial_json": piece.text}
