"""The HTTP server at a published vocabulary: what it answers is what the library gives."""

import pytest
from real_models import SIZES, make_llm, write_small
from served import serving

from jaxspec import SamplingParams
from jaxspec.api.async_llm import AsyncLLM

NAME = "falcon-h1-1.5b"
PROMPT = "import os"
MESSAGES = [{"role": "user", "content": "Hi"}]
SIZES = SIZES | {"max_model_len": 128}
# Fields of both the requests and `SamplingParams`.
BODIES = {
    "greedy": {},
    "top_p": {"temperature": 0.9, "top_p": 0.8},
    "top_k": {"temperature": 0.9, "top_k": 20},
    "regex": {"temperature": 0.9, "structured_outputs": {"regex": "[a-c]{2,3}x"}},
    "grammar": {"structured_outputs": {"grammar": 'start: "a" | "b" start "c"'}},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_small(NAME, tmp_path_factory.mktemp("falcon"), has_tokenizer=True)


@pytest.fixture(scope="module")
def served(folder):
    with serving(lambda: AsyncLLM(folder, load_format="dummy", **SIZES)) as found:
        yield found


@pytest.fixture(scope="module")
def reference(folder):
    with make_llm(folder, **SIZES) as llm:
        yield llm


def answered(served, path, **body):
    response = served.post(path, max_tokens=4, **body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.soak
@pytest.mark.parametrize("kind", BODIES)
def test_completions_and_chats_are_the_library_s(kind, served, reference):
    told = {"temperature": 0.0, "seed": 3, **BODIES[kind]}
    params = SamplingParams(max_tokens=4, **told)
    completion = answered(served, "/v1/completions", prompt=PROMPT, **told)
    chat = answered(served, "/v1/chat/completions", messages=MESSAGES, **told)
    wanted = reference.generate(PROMPT, params)[0], reference.chat(MESSAGES, params)[0]
    assert completion["choices"][0]["text"] == wanted[0].outputs[0].text
    assert chat["choices"][0]["message"]["content"] == wanted[1].outputs[0].text
    assert completion["usage"]["completion_tokens"] == len(wanted[0].outputs[0].token_ids)


@pytest.mark.soak
def test_logprobs(served, reference):
    told = {"temperature": 0.0, "logprobs": 2}
    completion = answered(served, "/v1/completions", prompt=PROMPT, **told)
    output = reference.generate(PROMPT, SamplingParams(max_tokens=4, **told))[0].outputs[0]
    logprobs = completion["choices"][0]["logprobs"]["token_logprobs"]
    given = zip(output.token_ids, output.logprobs, strict=True)
    assert logprobs == pytest.approx([place[token].logprob for token, place in given], abs=1e-4)
    chat = answered(
        served, "/v1/chat/completions", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    places = chat["choices"][0]["logprobs"]["content"]
    assert [len(place["top_logprobs"]) for place in places] == [2] * 4


@pytest.mark.soak
def test_no_parameters(served):
    for path, body in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
    ):
        response = served.post(path, **body)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] in ("stop", "length")
        assert response.json()["usage"]["completion_tokens"] > 0
