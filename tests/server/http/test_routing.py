"""JSON as the routes read it."""

import pytest
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.testclient import TestClient

from jaxspec.server.http.errors import ApiError, respond
from jaxspec.server.http.routing import make_router


class Body(BaseModel):
    x: float


@pytest.fixture(scope="module")
def client():
    app, router = FastAPI(exception_handlers={ApiError: respond}), make_router()

    @router.post("/x")
    async def x(body: Body):
        return body.x

    @router.get("/y")
    async def y():
        return 1

    app.include_router(router)
    return TestClient(app)


def test_json_is_read_with_any_charset(client):
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        found = client.post("/x", content=b'{"x": 1.5}', headers={"content-type": kind})
        assert found.json() == 1.5


def test_numbers_that_json_lacks_are_no_json(client):
    for content in (b'{"x": NaN}', b'{"x": Infinity}', b'{"x": 1e999}'):
        found = client.post("/x", content=content, headers={"content-type": "application/json"})
        assert found.status_code == 422 or found.json() is None


def test_other_types_and_none_are_a_415_where_there_is_a_body(client):
    """A page of another origin can send those without asking first."""
    assert client.post("/x", content=b'{"x": 1.5}').status_code == 415
    headers = {"content-type": "text/plain"}
    assert client.post("/x", content=b"{}", headers=headers).status_code == 415
    assert client.get("/y", headers=headers).status_code == 200
