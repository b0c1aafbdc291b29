"""The bodies of /tokenize and /detokenize."""

import pytest
from pydantic import ValidationError

from jaxspec.server.protocol.tokens import DetokenizeRequest, TokenizeRequest


def test_a_conversation_ends_where_the_assistant_begins():
    assert TokenizeRequest(messages=[]).add_generation_prompt


@pytest.mark.parametrize("tokens", [None, "x", ["x"], [1.0], [True], 3])
def test_ids_are_integers(tokens):
    with pytest.raises(ValidationError):
        DetokenizeRequest(tokens=tokens)
