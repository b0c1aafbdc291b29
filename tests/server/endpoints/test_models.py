"""GET /v1/models by the official client."""

import openai
import pytest


def test_models_are_listed_and_retrieved(client, served):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("short", "model", "jaxspec")
    assert model.max_model_len == served.llm.max_model_len == 512
    assert client.models.retrieve("short") == model
    assert served.get("/v1/models/").json() == served.get("/v1/models").json()
    with pytest.raises(openai.NotFoundError, match="model must be 'short'"):
        client.models.retrieve("org/other")
