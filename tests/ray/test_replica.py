"""A replica: the app's messages as they are, and what a failed engine does to requests."""

import asyncio
from types import SimpleNamespace

import pytest
from installed import needs

from jaxspec.ray.call import Call

# Ray's own imports warn.
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore"), needs("ray")]
CALL = Call.of({"type": "http", "method": "POST", "path": "/"}, b"body")


@pytest.fixture
def replica(monkeypatch):
    """A replica without a cluster; tests set its app."""
    from jaxspec.ray import replica as module

    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="mine"))
    monkeypatch.setattr(module.serve, "get_replica_context", lambda: context)
    found = module.Replica.__new__(module.Replica)
    found._llm = SimpleNamespace(is_healthy=True, error=None)
    return found


def messages_of(replica):
    async def collect():
        return [message async for message in replica.respond(CALL)]

    return asyncio.run(collect())


def app_with(status, before=lambda: None):
    async def app(scope, receive, send):
        assert scope == CALL.scope
        body = (await receive())["body"]
        before()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return app


@pytest.mark.parametrize("status", [200, 400, 503])
def test_messages_of_the_app_are_handed_on(replica, status):
    replica._app = app_with(status)
    start, body = messages_of(replica)
    assert (start["status"], body["body"]) == (status, CALL.body)
    asyncio.run(replica.check_health())


def test_a_failed_engine_refuses_requests_and_fails_its_health_check(replica):
    from jaxspec.ray.replica import EngineFailedError

    def fail():
        replica._llm = SimpleNamespace(is_healthy=False, error=ValueError("NaN"))

    replica._app = app_with(503, fail)  # in the middle of a request
    for _ in range(2):
        with pytest.raises(EngineFailedError) as caught:
            messages_of(replica)
        assert caught.value.replica_id == "mine"
        replica._app = None  # is not called
    with pytest.raises(EngineFailedError):
        asyncio.run(replica.check_health())


def test_closing_the_messages_ends_the_app(replica):
    ended = []

    async def app(scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await receive()
            await receive()  # waits for a disconnect
        finally:
            ended.append(True)

    async def go():
        messages = replica.respond(CALL)
        await anext(messages)
        await messages.aclose()

    replica._app = app
    asyncio.run(go())
    assert ended == [True]
