"""The bodies of /tokenize and /detokenize."""

import pytest
from pydantic import ValidationError

from jaxspec.server.protocol import DetokenizeRequest, TokenizeRequest


def test_what_is_not_given_is_left_to_the_template_as_in_a_chat():
    body = TokenizeRequest(messages=[])
    assert body.add_generation_prompt is None and body.continue_final_message is None


@pytest.mark.parametrize("tokens", [None, "x", ["x"], [1.0], [True], 3])
def test_ids_are_integers(tokens):
    with pytest.raises(ValidationError):
        DetokenizeRequest(tokens=tokens)
