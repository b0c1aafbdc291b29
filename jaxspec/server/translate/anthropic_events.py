"""Events of a streamed Anthropic message, built from parsed pieces.

API: https://docs.anthropic.com/en/api/messages-streaming. The name of an event is its `type`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.server.translate import anthropic
from jaxspec.server.translate.fields import Json
from jaxspec.text.parsers import Piece

PING: Json = {"type": "ping"}
"""Event that may be sent at any time to keep a connection open."""


class MessageEvents:
    """Builds the events of one message: call `begin`, `add` repeatedly, then `end`."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._index = -1  # index of the last block
        self._open: tuple[str, int] | None = None  # kind and call index of the open block

    def begin(self, used: Mapping[str, Any]) -> list[Json]:
        """Return the first events; `used` is the chat's usage so far."""
        message = anthropic.empty_message(self._model, anthropic.usage(used))
        return [{"type": "message_start", "message": message}, PING]

    def add(self, pieces: Iterable[Piece]) -> list[Json]:
        events: list[Json] = []
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
    ) -> list[Json]:
        """Return the last events, from a chat's `finish_reason`, vLLM's `stop_reason` and usage."""
        delta = anthropic.stop(finish_reason, stop_reason)
        last = {"type": "message_delta", "delta": delta, "usage": anthropic.usage(used)}
        return [*self._close(), last, {"type": "message_stop"}]

    @staticmethod
    def fail(status: int, message: str) -> Json:
        """Return the last event after an error."""
        return anthropic.error(status, message)

    def _begin_block(self, piece: Piece) -> Json:
        self._index += 1
        if piece.kind == "reasoning":
            block = anthropic.thinking_block("")
        elif piece.kind == "content":
            block = {"type": "text", "text": ""}
        else:
            block = anthropic.tool_block(piece.text, {})
        return self._block_event("start", content_block=block)

    def _close(self) -> list[Json]:
        is_open, self._open = self._open is not None, None
        return [self._block_event("stop")] if is_open else []

    def _block_event(self, step: str, **fields: Json) -> Json:
        return {"type": f"content_block_{step}", "index": self._index, **fields}


def _delta(piece: Piece) -> Json:
    if piece.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": piece.text}
    if piece.kind == "content":
        return {"type": "text_delta", "text": piece.text}
    return {"type": "input_json_delta", "partial_json": piece.text}
