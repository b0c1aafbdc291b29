"""Events of a streamed response, built from parsed pieces.

API: https://platform.openai.com/docs/api-reference/responses-streaming. An event is its name and
its JSON object, with sequence numbers from 0.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.server.translate import responses
from jaxspec.server.translate.fields import Json
from jaxspec.text.parsers import Piece
from jaxspec.text.parsers.json_reader import is_json

Event = tuple[str, Json]


class ResponseEvents:
    """Builds the events of one response: call `begin`, `add` repeatedly, then `end` or `fail`."""

    def __init__(self, body: Mapping[str, Any], model: str) -> None:
        """`body`: the request, as in `responses.chat_request`; `model`: model name to report."""
        self._response = responses.begin(body, model)
        self._number = 0  # sequence number of the next event
        self._output: list[Json] = []  # completed items
        self._item: Json | None = None  # item in progress
        self._source = ("", 0)  # kind and call index of the item in progress
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        """Return the first events."""
        return [self._event(name, response=self._response) for name in ("created", "in_progress")]

    def add(self, pieces: Iterable[Piece]) -> list[Event]:
        """Return the events of further pieces."""
        events: list[Event] = []
        for piece in pieces:
            source = "tool" if piece.kind.startswith("tool") else piece.kind, piece.index
            if self._item is None or source != self._source:
                events += self._end_item("completed")
                events += self._begin_item(piece)
                self._source = source
            if piece.kind != "tool_name":
                self._texts.append(piece.text)
                events.append(self._text_event("delta", delta=piece.text))
        return events

    def end(self, finish_reason: str, used: Mapping[str, Any]) -> list[Event]:
        """Return the last events, from a chat's `finish_reason` and usage."""
        events = self._end_item("incomplete" if finish_reason == "length" else "completed")
        told = responses.end(self._response, self._output, finish_reason, used)
        return [*events, self._event(told["status"], response=told)]

    def fail(self, message: str) -> list[Event]:
        """Return the last event of a failed response."""
        error = {"code": "server_error", "message": message}
        told = {**self._response, "status": "failed", "error": error, "output": self._output}
        return [self._event("failed", response=told)]

    def _begin_item(self, piece: Piece) -> list[Event]:
        if piece.kind == "reasoning":
            item, part = responses.reasoning_item(), {"type": "reasoning_text", "text": ""}
        elif piece.kind == "content":
            item, part = responses.message_item(), responses.text_part("")
        else:
            item, part = responses.call_item(piece.text), None
        self._item, self._texts = {**item, "status": "in_progress"}, []
        events = [self._item_event("output_item.added", item=dict(self._item))]
        if part:
            events.append(self._part_event("added", part))
        return events

    def _end_item(self, status: str) -> list[Event]:
        if self._item is None:
            return []
        item, told = self._item, "".join(self._texts)
        if item["type"] == "function_call":
            events = [self._text_event("done", arguments=told, name=item["name"])]
            item["arguments"] = told
            if not is_json(told):  # parsers may leave an incomplete call
                status = "incomplete"
        else:
            part = responses.text_part(told)
            if item["type"] == "reasoning":
                part = {"type": "reasoning_text", "text": told}
            events = [self._text_event("done", text=told), self._part_event("done", part)]
            item["content"] = [part]
        item["status"] = status
        events.append(self._item_event("output_item.done", item=item))
        self._output.append(item)
        self._item = None
        return events

    def _text_event(self, step: str, **told: Any) -> Event:
        assert self._item is not None
        told["item_id"] = self._item["id"]
        if self._item["type"] == "function_call":
            return self._item_event(f"function_call_arguments.{step}", **told)
        told["content_index"] = 0
        if self._item["type"] == "reasoning":
            return self._item_event(f"reasoning_text.{step}", **told)
        return self._item_event(f"output_text.{step}", logprobs=[], **told)

    def _part_event(self, step: str, part: Json) -> Event:
        assert self._item is not None
        told = {"item_id": self._item["id"], "content_index": 0, "part": part}
        return self._item_event(f"content_part.{step}", **told)

    def _item_event(self, name: str, /, **told: Any) -> Event:
        return self._event(name, output_index=len(self._output), **told)

    def _event(self, name: str, /, **told: Any) -> Event:
        kind, number = f"response.{name}", self._number
        self._number += 1
        return kind, {"type": kind, "sequence_number": number, **told}
