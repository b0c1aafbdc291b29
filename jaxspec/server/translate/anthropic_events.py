"""Events of a streamed Anthropic message, built from parsed pieces.

API: https://docs.anthropic.com/en/api/messages-streaming. An event is its name and its JSON object.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.server.translate import anthropic
from jaxspec.server.translate.fields import Json
from jaxspec.text.parsers import Piece

Event = tuple[str, Json]

PING: Event = ("ping", {"type": "ping"})
"""Event that may be sent at any time to keep a connection open."""


class MessageEvents:
    """Builds the events of one message: call `begin`, `add` repeatedly, then `end`."""

    def __init__(self, model: str) -> None:
        """`model`: model name in the message."""
        self._model = model
        self._index = -1  # index of the last block
        self._open: tuple[str, int] | None = None  # kind and call index of the open block

    def begin(self, used: Mapping[str, Any]) -> list[Event]:
        """Return the first events; `used` is the chat's usage so far."""
        message = anthropic.empty_message(self._model, anthropic.usage(used))
        return [("message_start", {"type": "message_start", "message": message}), PING]

    def add(self, pieces: Iterable[Piece]) -> list[Event]:
        """Return the events of further pieces."""
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
        """Return the last events, from a chat's `finish_reason`, vLLM's `stop_reason` and usage."""
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
    """Return the event of an error in a stream."""
    return "error", anthropic.error(status, message)


def _delta(piece: Piece) -> Json:
    if piece.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": piece.text}
    if piece.kind == "content":
        return {"type": "text_delta", "text": piece.text}
    return {"type": "input_json_delta", "partial_json": piece.text}
