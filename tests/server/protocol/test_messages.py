"""The bodies of /v1/messages: what must be there, in which types."""

import pytest
from pydantic import ValidationError

from jaxspec.server.protocol import CountTokensRequest, MessagesRequest

MESSAGES = [{"role": "user", "content": "x"}]


def test_what_is_given_is_handed_on_whole():
    given = {"messages": MESSAGES, "max_tokens": 3, "top_k": 2, "seen": [1]}
    assert MessagesRequest.model_validate(given).given() == given


def test_max_tokens_must_be_given_where_something_is_generated():
    CountTokensRequest(messages=MESSAGES)
    with pytest.raises(ValidationError, match="max_tokens"):
        MessagesRequest(messages=MESSAGES)
    with pytest.raises(ValidationError, match="max_tokens"):
        MessagesRequest(messages=MESSAGES, max_tokens="3")
