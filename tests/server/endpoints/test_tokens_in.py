"""Token ids in, token ids out: what a proxy renders once and sends on."""

import base64
import io
import json

import numpy as np
import pytest

from jaxspec import SamplingParams
from jaxspec.api.inputs import InputProcessor
from jaxspec.requests.outputs import TextDelta
from jaxspec.server.endpoints.tokens_in import _choice

MESSAGES = [{"role": "user", "content": "Hello"}]
SAMPLED = {"temperature": 0.9, "seed": 3, "max_tokens": 12}
PROMPT = [100, 101, 102, 103]


@pytest.mark.soak
def test_token_ids_get_what_the_library_gives(served, reference):
    asked = {"n": 2, "logprobs": 2, "prompt_logprobs": 1, **SAMPLED}
    found = served.post(
        "/inference/v1/generate", token_ids=PROMPT, sampling_params=asked, request_id="mine"
    ).json()
    (want,) = reference.generate([PROMPT], SamplingParams(**asked))
    assert [c["token_ids"] for c in found["choices"]] == [o.token_ids for o in want.outputs]
    assert [c["finish_reason"] for c in found["choices"]] == ["length", "length"]
    for choice, output in zip(found["choices"], want.outputs, strict=True):
        got = [place["logprob"] for place in choice["logprobs"]["content"]]
        own = [place[t].logprob for t, place in zip(output.token_ids, output.logprobs, strict=True)]
        assert got == pytest.approx(own, abs=1e-4)
        assert all(len(place["top_logprobs"]) == 2 for place in choice["logprobs"]["content"])
    assert len(found["prompt_logprobs"]) == len(PROMPT) and found["request_id"] == "mine"
    assert found["usage"]["completion_tokens"] == 24


def test_a_stream_joins_to_the_answer(served):
    body = {"token_ids": PROMPT, "sampling_params": SAMPLED}
    whole = served.post("/inference/v1/generate", **body).json()
    with (
        served.client() as client,
        client.stream(
            "POST",
            "/inference/v1/generate",
            json=body | {"stream": True, "stream_options": {"include_usage": True}},
        ) as answer,
    ):
        lines = [line for line in answer.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    tokens = [t for chunk in chunks for c in chunk["choices"] for t in c["token_ids"]]
    assert tokens == whole["choices"][0]["token_ids"] and last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12


def test_a_rendered_chat_continues_as_the_chat_does(served, reference):
    body = {"messages": MESSAGES, "return_token_ids": True, **SAMPLED}
    rendered = served.post("/v1/chat/completions/render", **body).json()
    assert rendered["token_ids"] == reference.tokenizer.chat(MESSAGES)
    assert rendered["prompt"] == reference.tokenizer.render_chat(MESSAGES)
    found = served.post("/inference/v1/generate", **rendered).json()
    chat = served.post("/v1/chat/completions", **body).json()
    assert found["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]


def test_rendered_completions_are_one_for_each_prompt(served, reference):
    prompts = ["def f(x):", "import os"]
    found = served.post("/v1/completions/render", prompt=prompts, **SAMPLED).json()
    assert [each["token_ids"] for each in found] == list(map(reference.tokenizer.encode, prompts))
    assert all(each["sampling_params"]["max_tokens"] == 12 for each in found)


@pytest.mark.parametrize(
    "body, said",
    [
        ({}, "token_ids must be given"),
        ({"token_ids": []}, "token_ids must hold at least one"),
        ({"token_ids": [10**9]}, "Token ids must be"),
        ({"token_ids": PROMPT, "sampling_params": {"temperature": -1}}, "temperature must be"),
        ({"token_ids": PROMPT, "sampling_params": {"temperature": "a"}}, "temperature must be"),
        ({"token_ids": PROMPT, "sampling_params": {"guided_json": {"not": {}}}}, "guided_json"),
        ({"token_ids": PROMPT, "sampling_params": {"extra_args": 3}}, "extra_args must be"),
        ({"token_ids": PROMPT, "sampling_params": {"extra_args": {"a": {}}}}, "extra_args['a']"),
        ({"token_ids": PROMPT, "sampling_params": {"extra_args": {"a": 1}}}, "extra_args must be"),
        ({"token_ids": PROMPT, "features": {"mm_hashes": {}}}, "features can't be"),
    ],
)
def test_bad_input_is_a_400(served, body, said):
    found = served.post("/inference/v1/generate", **body)
    error = found.json()["error"]
    assert found.status_code == 400 and said in error["message"]
    assert "vllm_xargs" not in f"{error}"  # a field of other routes


def test_experts_of_tokens_are_a_npy_file_in_base64():
    experts = np.arange(24, dtype=np.uint16).reshape(4, 2, 3)
    delta = TextDelta("", [7, 8], "length", routed_experts=experts)
    choice = json.loads(json.dumps(_choice(0, delta, SamplingParams(), None)))
    file = io.BytesIO(base64.b64decode(choice["routed_experts"]))
    found = np.load(file, allow_pickle=False)
    assert found.dtype == experts.dtype
    np.testing.assert_array_equal(found, experts)
    assert "routed_experts" not in _choice(0, TextDelta("", [7]), SamplingParams(), None)


def test_the_first_token_with_experts_is_passed_on(served, monkeypatch):
    """Of an engine that returns none it means nothing."""
    starts, make = [], InputProcessor.process_one

    def noted(self, prompt, params, *others):
        starts.append(params.routed_experts_prompt_start)
        return make(self, prompt, params, *others)

    monkeypatch.setattr(InputProcessor, "process_one", noted)
    for given, status in ((None, 200), (3, 200), (-1, 400), ("x", 400)):
        sampling = {"max_tokens": 1, "routed_experts_prompt_start": given}
        answer = served.post("/inference/v1/generate", token_ids=PROMPT, sampling_params=sampling)
        assert answer.status_code == status, answer.text
    assert starts[:2] == [0, 3]
