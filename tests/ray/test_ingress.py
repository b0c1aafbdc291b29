"""The ingress before replicas that die or fail: what is repeated, and how a stream ends."""

import asyncio
import json

import pytest
from installed import needs

# Ray's own imports warn.
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore"), needs("ray")]

START = {"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"a")]}
SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}


def part(data, more=True):
    return {"type": "http.response.body", "body": data, "more_body": more}


class Handle:
    """A deployment's handle; each call has the next script: messages, and errors to raise."""

    def __init__(self, *scripts):
        self.scripts, self.calls, self.num_cancelled = list(scripts), [], 0

    def options(self, **options):
        assert options == {"method_name": "respond", "stream": True}
        return self

    def remote(self, call):
        self.calls.append(call)
        return Messages(self, self.scripts.pop(0))


class Messages:
    def __init__(self, handle, script):
        self.handle, self.script = handle, iter(script)

    def __aiter__(self):
        return self

    async def __anext__(self):
        each = next(self.script, None)
        if each is None:
            raise StopAsyncIteration
        if isinstance(each, Exception):
            raise each
        if each == "wait":
            await asyncio.Event().wait()
        return each

    def cancel(self):
        self.handle.num_cancelled += 1


def respond(handle, path="/v1/completions", delays=(0.0, 0.0)):
    from jaxspec.ray.ingress import Forward

    sent = []

    async def receive():
        return {"type": "http.request", "body": b'{"prompt": "a"}'}

    async def send(message):
        sent.append(message)

    asyncio.run(Forward(handle, delays)(SCOPE | {"path": path}, receive, send))
    return sent


def lost():
    from ray.exceptions import RayActorError

    return RayActorError()


def failed(name):
    """The replica's error as Ray raises it in the ingress."""
    from ray.exceptions import RayTaskError

    from jaxspec.ray.replica import EngineFailedError

    return RayTaskError("respond", "", EngineFailedError(name)).as_instanceof_cause()


def test_a_request_of_which_nothing_was_sent_is_repeated():
    whole = [START, part(b"{}", more=False)]
    handle = Handle([lost()], [START, lost()], whole)
    start, body = respond(handle)
    assert start["headers"] == [] and body["body"] == b"{}"  # Ray's proxy adds the request id
    assert len(handle.calls) == 3 and handle.calls[0].prefix is not None


def test_a_replica_whose_engine_failed_is_avoided():
    handle = Handle([failed("a")], [failed("b")], [START, part(b"{}", more=False)])
    assert respond(handle)[-1]["body"] == b"{}"
    assert [set(call.avoid) for call in handle.calls] == [set(), {"a"}, {"a", "b"}]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
def test_a_stream_that_has_begun_ends_with_an_error(path):
    handle = Handle([START, part(b"data: 1\n\n"), lost()])
    *_, last = respond(handle, path)
    assert len(handle.calls) == 1 and not last.get("more_body")
    events = last["body"].decode().split("\n\n")
    data = json.loads(events[0].partition("data: ")[2])
    assert "replica" in json.dumps(data) and "error" in json.dumps(data)


def test_what_no_replica_answers_is_a_503():
    handle = Handle([lost()], [lost()], [lost()])
    start, body = respond(handle)
    assert start["status"] == 503 and dict(start["headers"])[b"retry-after"]
    assert "replica" in json.loads(body["body"])["error"]["message"]


def test_a_replica_that_dies_after_the_last_byte_changes_nothing():
    sent = respond(Handle([START, part(b"{}", more=False), lost()]))
    assert [message["type"] for message in sent] == [START["type"], part(b"")["type"]]


def test_a_client_that_goes_cancels_its_request():
    from jaxspec.ray.ingress import Forward

    handle = Handle([START, part(b"data: 1\n\n"), "wait"])

    async def go():
        begun = asyncio.Event()

        async def receive():
            return {"type": "http.request", "body": b""}

        async def send(message):
            begun.set()

        work = asyncio.create_task(Forward(handle)(SCOPE, receive, send))
        await begun.wait()
        work.cancel()
        await asyncio.wait({work})

    asyncio.run(go())
    assert handle.num_cancelled == 1
