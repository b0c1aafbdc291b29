"""The prefix that routes a request: the same for all turns of a conversation, and for no other."""

import json
import pickle

import pytest

from jaxspec.ray.call import Call, prefix_of


def prefix(**fields):
    return prefix_of(json.dumps(fields).encode())


def user(text):
    return {"role": "user", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize(
    ("first", "later", "other"),
    [
        (
            {"messages": [SYSTEM, user("a")]},
            {"messages": [SYSTEM, user("a"), ANSWER, user("b")], "max_tokens": 5},
            {"messages": [SYSTEM, user("b"), ANSWER, user("a")]},
        ),
        (
            {"system": "s", "messages": [user("a")]},
            {"messages": [user("a"), ANSWER, user("b")], "system": "s", "stream": True},
            {"system": "t", "messages": [user("a")]},
        ),
        (
            {"input": [user("a")], "instructions": "i"},
            {"input": [user("a"), ANSWER, user("b")], "instructions": "i"},
            {"input": [user("a")]},
        ),
        ({"prompt": "a" * 2000}, {"prompt": "a" * 3000}, {"prompt": "b" + "a" * 2000}),
        ({"prompt": ["a", "b"]}, {"prompt": "a"}, {"prompt": ["b", "a"]}),
        ({"token_ids": [*range(2000)]}, {"token_ids": [*range(3000)]}, {"token_ids": [1]}),
        ({"prompt": [1, 2]}, {"prompt": [[1, 2], [3]]}, {"prompt": [1, 2], "cache_salt": "x"}),
    ],
)
def test_it_is_that_of_the_conversation(first, later, other):
    assert prefix(**first) == prefix(**later) is not None
    assert prefix(**first) != prefix(**other)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"a"', b"{}", b'{"prompt": ""}', b'{"messages": []}', b"[" * 2000]
    + [b'{"prompt": %s1%s}' % (b"[" * 500, b"]" * 500)],
)
def test_what_has_none_is_left_to_a_replica(body):
    assert prefix_of(body) is None


def test_a_call_has_plain_values_alone():
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"a", b"b")]}
    call = Call.of({**scope, "app": lambda: None, "state": object()}, b'{"prompt": "a"}')
    assert call.scope == scope and call.prefix == prefix(prompt="a")
    assert pickle.loads(pickle.dumps(call)) == call
