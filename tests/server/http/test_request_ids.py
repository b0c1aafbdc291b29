"""Request ids go back as they came, if they are sound."""

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from jaxspec.server.http.request_ids import RequestIds

CLIENT = TestClient(RequestIds(PlainTextResponse("")))


def test_a_sound_id_goes_back():
    given = "Ab-9_.x" * 9
    assert CLIENT.get("/", headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "a" * 65, "<script>", "é".encode("latin-1"), "a\tb"])
def test_another_is_replaced(given):
    found = CLIENT.get("/", headers={"x-request-id": given}).headers["x-request-id"]
    assert len(found) == 32 and found.isalnum()


def test_ids_differ():
    assert len({CLIENT.get("/").headers["x-request-id"] for _ in range(9)}) == 9


def test_the_log_names_a_request_that_failed(caplog):
    async def broken(scope, receive, send):
        raise KeyError("a bug")

    with caplog.at_level("INFO", "uvicorn.error"), pytest.raises(KeyError):
        TestClient(RequestIds(broken)).get("/x%0Ay", headers={"x-request-id": "mine"})
    assert caplog.messages == ["GET /x%0Ay (request mine): 500, and what follows says why."]
