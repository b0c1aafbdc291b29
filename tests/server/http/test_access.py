"""Keys: who is let in, and that it takes each key's comparison whatever came."""

import asyncio
import hmac

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from jaxspec.server.http import access
from jaxspec.server.http.access import RequireKey, client_of, network_of


def guarded(*keys, protect_metrics=False):
    return TestClient(RequireKey(PlainTextResponse("in"), keys, protect_metrics=protect_metrics))


def status(client, path="/v1/models", method="GET", **headers):
    return client.request(method, path, headers=headers).status_code


def test_without_keys_everybody_is_let_in():
    assert status(guarded()) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer secre"},
        {"authorization": "Bearer secret2"},
        {"authorization": "Bearer "},
        {"authorization": "secret"},
        {"authorization": "Basic secret"},
        {"x-api-key": "SECRET"},
        {"authorization": "Bearer sécret".encode()},
    ],
)
def test_a_request_without_a_whole_key_gets_401(headers):
    found = guarded("secret", "other").get("/v1/models", headers=headers)
    assert found.status_code == 401
    assert found.json()["error"]["type"] == "AuthenticationError"
    assert "secret" not in found.text


@pytest.mark.parametrize("key", ["secret", "other"])
def test_each_key_opens_in_either_client_s_manner(key):
    client = guarded("secret", "other")
    assert status(client, authorization=f"Bearer {key}") == 200
    assert status(client, authorization=f"bearer  {key}") == 200
    assert status(client, **{"x-api-key": key}) == 200


def test_orchestrators_and_browsers_questions_need_no_key():
    client = guarded("secret")
    assert [status(client, path) for path in ("/health", "/ready", "/ping", "/metrics")] == [
        200
    ] * 4
    assert status(client, method="OPTIONS") == 200
    assert status(guarded("secret", protect_metrics=True), "/metrics") == 401
    assert status(client, "/health/../v1/models") == 401 or status(client, "/v1/models") == 401


def test_every_key_is_compared_whichever_fits(monkeypatch):
    compared, real = [], hmac.compare_digest

    def compare(a, b):
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(access.hmac, "compare_digest", compare)
    assert status(guarded("first", "second", "third"), authorization="Bearer first") == 200
    assert compared == [(32, 32)] * 3


def test_what_is_no_request_passes():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    asyncio.run(RequireKey(app, ["k"], protect_metrics=False)({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"]


def test_one_client_is_an_address_or_the_network_that_it_may_choose_from():
    same = ["2001:db8:1:2::1", "2001:db8:1:2:ffff::9"]
    assert len({*map(network_of, same)}) == 1
    assert network_of("2001:db8:1:3::1") != network_of(same[0])
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") != network_of("10.0.0.2")
    assert network_of("::1") != network_of("") == ""


def test_a_client_is_its_key_where_keys_are_needed_and_else_its_network():
    def client(key, address, *keys):
        found = []

        async def app(scope, receive, send):
            found.append(client_of(scope))

        headers = [(b"x-api-key", key.encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": headers}
        scope["client"] = (address, 1) if address else None
        asyncio.run(RequireKey(app, keys, protect_metrics=False)(scope, None, None))
        return found[0]

    assert client("a", "10.0.0.1", "a", "b") == client("a", "10.0.0.2", "a", "b")
    assert client("a", "10.0.0.1", "a", "b") != client("b", "10.0.0.1", "a", "b")
    assert "secret" not in client("secret", "10.0.0.1", "secret")
    assert client("a", "10.0.0.1") == client("b", "10.0.0.1") == "10.0.0.1"
    assert client("a", None) == ""
