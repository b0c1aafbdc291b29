"""The body of /v1/responses."""

import pytest
from pydantic import ValidationError

from jaxspec.server.protocol import ResponsesRequest


def test_an_input_is_a_text_or_items():
    assert ResponsesRequest(input="x").given() == {"input": "x"}
    items = [{"role": "user", "content": "x"}]
    assert ResponsesRequest(input=items, store=True).given() == {"input": items, "store": True}
    for wrong in (3, ["x"], {"role": "user"}):
        with pytest.raises(ValidationError):
            ResponsesRequest(input=wrong)
