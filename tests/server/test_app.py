"""The app as a whole: keys, CORS, the OpenAPI document, and what a failure of the engine does."""

import json
import shutil
import subprocess
import threading

import httpx
import langchain_openai
import openai
import pytest
from scripted_llm import ScriptedLLM
from served import serving

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.server.app import make_app

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_keys_guard_all_but_what_orchestrators_ask(tmp_path):
    path = tmp_path / "keys"
    path.write_text("second\n")
    with serving(lambda: ScriptedLLM(["a"], PLAIN), api_key=["first"], api_key_file=path) as served:
        for key in ("first", "second"):
            client = openai.OpenAI(base_url=served.url, api_key=key, max_retries=0)
            with client:
                assert client.models.list().data[0].id == "scripted"
        with (
            openai.OpenAI(base_url=served.url, api_key="firs", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="A key is needed"),
        ):
            client.models.list()
        assert served.get("/health").status_code == 200
        for route in ("/openapi.json", "/tokenizer_info", "/load", "/nowhere"):
            assert served.get(route).status_code == 401, route
        refused = served.post("/v1/messages", messages=[], max_tokens=1)
        assert refused.json()["error"]["type"] == "authentication_error"  # in Anthropic's form


def test_pages_may_call_only_if_their_origin_is_allowed():
    origin = {"origin": "https://a.example"}
    with serving(lambda: ScriptedLLM(["a"], PLAIN)) as served:
        found = served.get("/v1/models", headers=origin)
        assert "access-control-allow-origin" not in found.headers
    with serving(
        lambda: ScriptedLLM(["a"], PLAIN), allowed_origins=["https://a.example"], api_key=["k"]
    ) as served:
        with served.client() as client:
            asked = {**origin, "access-control-request-method": "POST"}
            asked["access-control-request-headers"] = "authorization"
            assert client.options("/v1/models", headers=asked).status_code == 200
        found = served.get("/v1/models", headers=origin)  # without a key: the page sees the error
        assert found.status_code == 401
        assert found.headers["access-control-allow-origin"] == "https://a.example"


def test_langchain_follows():
    with serving(lambda: ScriptedLLM(["Hello ", "there"], PLAIN)) as served:
        model = langchain_openai.ChatOpenAI(
            base_url=served.url, api_key="k", model="scripted", max_retries=0
        )
        assert model.invoke("Hi").content == "Hello there"
        assert "".join(chunk.content for chunk in model.stream("Hi")) == "Hello there"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_follows_and_is_told_what_it_forgets():
    body = '{"messages": [{"role": "user", "content": "Hi"}], "stream": true}'

    def curl(*words):
        command = ["curl", "-sN", "--max-time", "60", *words, "-d", body]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with serving(lambda: ScriptedLLM(["Hel", "lo"], PLAIN)) as served:
        url = f"{served.url}/chat/completions"
        *events, done = curl(url, "-H", "content-type: application/json").strip().split("\n\n")
        deltas = [
            json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events
        ]
        assert "".join(delta.get("content", "") for delta in deltas) == "Hello"
        assert done == "data: [DONE]"
        error = json.loads(curl(url))["error"]
        assert error["code"] == 415 and "content-type: application/json" in error["message"]


def test_a_model_without_a_tokenizer_is_refused():
    llm = ScriptedLLM([], PLAIN)
    llm.tokenizer = None
    with pytest.raises(ValueError, match="needs the model's tokenizer"):
        make_app(llm)


def test_a_failure_in_a_step_is_told_to_every_stream_and_health_is_503(short_model):
    """The engine is dead then; no program is compiled, for no step comes so far."""
    may_fail = threading.Event()

    def step():
        may_fail.wait(60)
        raise FloatingPointError("planted in /secret/place.py")

    def make():
        llm = AsyncLLM(short_model, max_num_seqs=4, flight_recorder="off")
        llm._engine._compiler.ensure = lambda feature_sets: None
        llm._engine.session.engine.step = step
        return llm

    with serving(make) as served:
        answers = [None] * 6

        def ask(number):
            body = {"prompt": "a", "max_tokens": 5, "stream": number < 4}
            answers[number] = httpx.post(f"{served.url}/completions", json=body, timeout=60)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        while served.llm.num_running + served.llm.num_waiting < 6:
            pass
        assert served.get("/health").status_code == 200
        may_fail.set()
        for thread in threads:
            thread.join()
        for answer in answers[:4]:
            assert answer.status_code == 200
            *_, last, done = answer.text.strip().split("\n\n")
            error = json.loads(last.removeprefix("data: "))["error"]
            assert done == "data: [DONE]" and error["code"] == 503
        assert [answer.status_code for answer in answers[4:]] == [503, 503]
        assert not any("secret" in answer.text for answer in answers)
        assert served.get("/health").status_code == served.get("/ready").status_code == 503
        late = served.post("/v1/completions", prompt="a")
        assert late.status_code == 503 and late.headers["retry-after"]
        assert 'reason="engine_dead"' in served.get("/metrics").text
