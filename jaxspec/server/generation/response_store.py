"""ResponseStore: responses of /v1/responses in memory, for later turns."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from jaxspec.checks import shown
from jaxspec.server.http.errors import ApiError
from jaxspec.server.translate.fields import FieldError, Json, objects


class _Stored(NamedTuple):
    response: bytes  # JSON
    items: bytes  # JSON of all items of the conversation: earlier ones, input, output
    ids: frozenset[str]  # of those items that have one

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)


class ResponseStore:
    """Responses by id with the items of their conversations, bounded in number and bytes.

    The least recently used ones are dropped. A response larger than the store is not kept.
    """

    def __init__(self, max_responses: int, max_bytes: int):
        """Keep at most `max_responses` of together `max_bytes` bytes of JSON; 0 keeps none."""
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored = OrderedDict[str, _Stored]()  # the least recently used first
        self._response_of = dict[str, str]()  # item id to the id of the newest response with it
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def is_enabled(self) -> bool:
        return self._max_responses > 0

    def add(self, response: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> None:
        """Keep a finished response and all items of its conversation."""
        ids = frozenset(each["id"] for each in items if isinstance(each.get("id"), str))
        stored = _Stored(orjson.dumps(response), orjson.dumps(items), ids)
        if not self.is_enabled or stored.num_bytes > self._max_bytes:
            return
        self._stored[response["id"]] = stored
        self._response_of |= dict.fromkeys(ids, response["id"])
        self.num_bytes += stored.num_bytes
        while len(self._stored) > self._max_responses or self.num_bytes > self._max_bytes:
            self.remove(next(iter(self._stored)))

    def response(self, response_id: str) -> Json:
        """Return a response as it was sent.

        Raises:
            ApiError: 404, it is not stored.
        """
        return orjson.loads(self._find(response_id, "response_id", 404).response)

    def remove(self, response_id: str) -> None:
        """Drop a response; later turns can't refer to it.

        Raises:
            ApiError: 404, it is not stored.
        """
        stored = self._find(response_id, "response_id", 404)
        del self._stored[response_id]
        self.num_bytes -= stored.num_bytes
        for item_id in stored.ids:
            if self._response_of[item_id] == response_id:
                del self._response_of[item_id]

    def history(self, response_id: str | None) -> list[Json]:
        """Return the items up to the end of a response, none for None.

        Raises:
            ApiError: 400, it is not stored.
        """
        if response_id is None:
            return []
        return orjson.loads(self._find(response_id, "previous_response_id", 400).items)

    def resolved(self, given: Any) -> Any:
        """Return an input with stored items for its `item_reference`s.

        Raises:
            FieldError: an item is not stored.
        """
        if not isinstance(given, list):
            return given
        return [
            self._item(item.get("id"), f"{place}.id") if _is_reference(item) else item
            for place, item in objects(given, "input")
        ]

    def _item(self, item_id: Any, place: str) -> Json:
        response_id = self._response_of.get(item_id) if isinstance(item_id, str) else None
        if response_id is None:
            rule = f"must be the id of a stored item, got {{}}. {self._advice} the item itself."
            raise FieldError(place, rule, item_id)
        return next(each for each in self.history(response_id) if each.get("id") == item_id)

    def _find(self, response_id: str, name: str, status: int) -> _Stored:
        if response_id not in self._stored:
            raise ApiError(
                status,
                f"{name} must be the id of a stored response, got {shown(response_id)}. "
                f"{self._advice} all items as input.",
                param=name,
                code="previous_response_not_found" if status == 400 else None,
            )
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    @property
    def _advice(self) -> str:
        if self.is_enabled:
            return f"The server keeps the last {self._max_responses:,} in memory. Otherwise send"
        return "The server stores none (--max-stored-responses, --api-processes). Send"


def _is_reference(item: Mapping[str, Any]) -> bool:
    given = {name for name, value in item.items() if value is not None}
    return item.get("type") == "item_reference" or given == {"id"}
