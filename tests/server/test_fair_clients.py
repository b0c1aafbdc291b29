"""Work that one client asks for and that takes seconds: neighbours are answered meanwhile."""

import asyncio

import httpx
import pytest

from jaxspec.server.app import make_app
from jaxspec.server.options import ServerOptions
from jaxspec.text import template_process

ENDLESS = "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
WORDS = "1984, hello \n" * 150_000
SHORT = {"prompt": "def f(x):", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
HEAVY = {
    "templates": ("/v1/chat/completions", CHAT | {"chat_template": ENDLESS}),
    "texts": ("/tokenize", {"prompt": WORDS}),
    "counted chats": ("/tokenize", {"messages": CHAT["messages"], "chat_template": ENDLESS}),
}
LIGHT = {
    "completion": ("/v1/completions", SHORT),
    "truncated": ("/v1/completions", SHORT | {"truncate_prompt_tokens": 2}),
    "tokens": ("/tokenize", {"prompt": "def"}),
}
OTHER = {"template": ("/v1/chat/completions", CHAT | {"chat_template": TEMPLATE})}


@pytest.fixture(scope="module")
def app(served):
    assert served.post("/v1/completions", **SHORT).status_code == 200  # it has compiled
    return make_app(served.llm, ServerOptions(trust_request_chat_template=True))


def client_at(app, address):
    transport = httpx.ASGITransport(app, client=(address, 1))
    return httpx.AsyncClient(transport=transport, base_url="http://x", timeout=120)


@pytest.mark.soak
@pytest.mark.parametrize("kind", HEAVY)
@pytest.mark.parametrize("address, light", [("10.0.0.1", LIGHT), ("10.0.0.2", LIGHT | OTHER)])
def test_a_neighbour_is_answered_while_they_run(kind, address, light, app, served, monkeypatch):
    """One with the same address too: short work does not wait for long work."""
    monkeypatch.setattr(template_process, "TIME_LIMIT", 3)

    async def ask():
        async with client_at(app, "10.0.0.1") as one, client_at(app, address) as other:
            path, body = HEAVY[kind]
            heavy = [asyncio.create_task(one.post(path, json=body)) for _ in range(8)]
            try:
                await asyncio.sleep(0.1)
                for path, body in light.values():
                    found = await other.post(path, json=body)
                    assert found.status_code == 200, found.text
                return [task.done() for task in heavy]
            finally:
                for task in heavy:
                    task.cancel()
                await asyncio.wait(heavy)

    assert served.call(ask()).count(False) >= 4
