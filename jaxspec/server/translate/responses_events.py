"""Events of a streamed response, built from parsed pieces.

API: https://platform.openai.com/docs/api-reference/responses-streaming. The name of an
event is its `type`; sequence numbers begin with 0.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.server.translate import responses
from jaxspec.server.translate.fields import Json
from jaxspec.text.parsers import Piece
from jaxspec.text.parsers.json_reader import is_json


class ResponseEvents:
    """Builds the events of one response: call `begin`, `add` repeatedly, then `end` or `fail`."""

    def __init__(self, body: Mapping[str, Any], model: str) -> None:
        """`body`: the request, as in `responses.chat_request`; `model`: model name to report."""
        self._response, self._names = responses.begin(body, model), responses.names_of_calls(body)
        self._number = 0  # sequence number of the next event
        self._output: list[Json] = []  # completed items
        self._item: Json | None = None  # item in progress
        self._source = ("", 0)  # kind and call index of the item in progress
        self._texts: list[str] = []

    def begin(self, used: Mapping[str, Any]) -> list[Json]:
        """Return the first events; the usage so far is not in them."""
        del used
        return [self._event(name, response=self._response) for name in ("created", "in_progress")]

    def add(self, pieces: Iterable[Piece]) -> list[Json]:
        events: list[Json] = []
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

    def end(
        self, finish_reason: str, stop_reason: str | int | None, used: Mapping[str, Any]
    ) -> list[Json]:
        """Return the last events, from a chat's `finish_reason` and usage."""
        del stop_reason  # not in this API
        events = self._end_item("incomplete" if finish_reason == "length" else "completed")
        response = responses.end(self._response, self._output, finish_reason, used)
        return [*events, self._event(response["status"], response=response)]

    def fail(self, status: int, message: str) -> Json:
        """Return the last event after an error, whose HTTP status is not in it."""
        del status
        error = {"code": "server_error", "message": message}
        failed = {**self._response, "status": "failed", "error": error, "output": self._output}
        return self._event("failed", response=failed)

    def _begin_item(self, piece: Piece) -> list[Json]:
        if piece.kind == "reasoning":
            item, part = responses.reasoning_item(), {"type": "reasoning_text", "text": ""}
        elif piece.kind == "content":
            item, part = responses.message_item(), responses.text_part("")
        else:
            item, part = responses.call_item(piece.text), None
            item |= self._names.get(piece.text, {})
        self._item, self._texts = {**item, "status": "in_progress"}, []
        events = [self._item_event("output_item.added", item=dict(self._item))]
        if part:
            events.append(self._part_event("added", part))
        return events

    def _end_item(self, status: str) -> list[Json]:
        if self._item is None:
            return []
        item, text = self._item, "".join(self._texts)
        if item["type"] == "function_call":
            events = [self._text_event("done", arguments=text, name=item["name"])]
            item["arguments"] = text
            if not is_json(text):  # parsers may leave an incomplete call
                status = "incomplete"
        else:
            part = responses.text_part(text)
            if item["type"] == "reasoning":
                part = {"type": "reasoning_text", "text": text}
            events = [self._text_event("done", text=text), self._part_event("done", part)]
            item["content"] = [part]
        item["status"] = status
        events.append(self._item_event("output_item.done", item=item))
        self._output.append(item)
        self._item = None
        return events

    def _text_event(self, step: str, **fields: Any) -> Json:
        assert self._item is not None
        fields["item_id"] = self._item["id"]
        if self._item["type"] == "function_call":
            return self._item_event(f"function_call_arguments.{step}", **fields)
        fields["content_index"] = 0
        if self._item["type"] == "reasoning":
            return self._item_event(f"reasoning_text.{step}", **fields)
        return self._item_event(f"output_text.{step}", logprobs=[], **fields)

    def _part_event(self, step: str, part: Json) -> Json:
        assert self._item is not None
        place = {"item_id": self._item["id"], "content_index": 0}
        return self._item_event(f"content_part.{step}", **place, part=part)

    def _item_event(self, name: str, /, **fields: Any) -> Json:
        return self._event(name, output_index=len(self._output), **fields)

    def _event(self, name: str, /, **fields: Any) -> Json:
        self._number += 1
        return {"type": f"response.{name}", "sequence_number": self._number - 1, **fields}
