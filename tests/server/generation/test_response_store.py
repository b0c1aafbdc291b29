"""ResponseStore: bounded in number and bytes, the least recently used response goes first."""

import pytest

from jaxspec.server.generation.response_store import ResponseStore
from jaxspec.server.http.errors import ApiError
from jaxspec.server.translate import FieldError


def add(store, number, size=0):
    item = {"id": f"msg_{number}", "type": "message", "role": "assistant", "content": "x" * size}
    store.add({"id": f"resp_{number}", "output": [item]}, [{"role": "user"}, item])
    return item


def held(store):
    return [number for number in range(9) if f"resp_{number}" in store._stored]


def test_the_least_recently_used_goes_first():
    store = ResponseStore(3, 10_000)
    for number in range(3):
        add(store, number)
    assert store.history("resp_0")[0] == {"role": "user"}  # used now
    add(store, 3)
    assert held(store) == [0, 2, 3] and len(store) == 3
    add(store, 4, size=1000)
    add(store, 5, size=4000)
    assert store.num_bytes <= 10_000 and held(store) == [5]
    add(store, 6, size=20_000)
    assert held(store) == [5], "larger than the store"


def test_nothing_stays_of_what_is_removed():
    store = ResponseStore(3, 10_000)
    item = add(store, 1)
    assert (
        store.resolved([{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}]) == [item] * 2
    )
    assert store.response("resp_1")["output"] == [item]
    store.remove("resp_1")
    assert store.num_bytes == 0 and not store._response_of
    for call in (store.response, store.remove):
        with pytest.raises(ApiError) as caught:
            call("resp_1")
        assert caught.value.status == 404
    with pytest.raises(ApiError) as caught:
        store.history("resp_1")
    assert (caught.value.status, caught.value.code) == (400, "previous_response_not_found")
    with pytest.raises(FieldError) as wrong:
        store.resolved([{"role": "user"}, {"id": "msg_1"}])
    assert wrong.value.param == "input.1.id"


def test_an_item_of_two_responses_goes_with_the_newer_one():
    store = ResponseStore(3, 10_000)
    item = add(store, 1)
    store.add({"id": "resp_2"}, [item, {"role": "user"}])
    store.remove("resp_1")
    assert store.resolved([{"id": "msg_1"}]) == [item]
    store.remove("resp_2")
    with pytest.raises(FieldError):
        store.resolved([{"id": "msg_1"}])


def test_a_store_of_none_keeps_none():
    store = ResponseStore(0, 10_000)
    add(store, 1)
    assert not store.is_enabled and len(store) == 0
    assert store.history(None) == [] and store.resolved("Hi") == "Hi"
    with pytest.raises(ApiError, match="stores none"):
        store.history("resp_1")
