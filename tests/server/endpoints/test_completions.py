"""POST /v1/completions by the official client: what it answers is what the library gives."""

import openai
import pytest
from scripted_llm import ScriptedLLM, TemplateTokenizer
from served import serving
from walks import walk

from jaxspec import SamplingParams
from jaxspec.api.loading import EMBEDDED_MODEL

PROMPT = "def fibonacci(n):"
MODEL = "short"


def test_a_completion_is_the_library_s(client, reference):
    found = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24)
    (want,) = reference.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=24))
    (choice,) = found.choices
    assert choice.text == want.outputs[0].text
    assert (choice.index, choice.finish_reason) == (0, want.outputs[0].finish_reason)
    assert found.object == "text_completion" and found.model == MODEL
    assert found.id.startswith("cmpl-")
    usage = found.usage
    assert usage.prompt_tokens == len(want.prompt_token_ids)
    assert usage.completion_tokens == len(want.outputs[0].token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.completion_tokens_details
    metrics = want.outputs[0].metrics
    assert details.accepted_prediction_tokens == metrics.num_accepted_tokens
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == (
        metrics.num_draft_tokens
    )


def test_streamed_text_is_the_same(lenient, reference):
    chunks = list(
        lenient.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    (want,) = reference.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=24))
    *told, last = chunks
    assert "".join(c.choices[0].text for c in told) == want.outputs[0].text
    assert [c.choices[0].finish_reason for c in told][-1] == "length"
    assert last.choices == [] and last.usage.completion_tokens == 24
    assert all(c.usage is None for c in told) and len({c.id for c in chunks}) == 1


def test_usage_comes_with_each_chunk_if_asked_for(lenient):
    chunks = list(
        lenient.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 8 and counts[0] > 0


def test_prompts_and_samples_are_numbered_in_order(lenient, reference):
    prompts = [PROMPT, "import os\n"]
    found = lenient.completions.create(
        model=MODEL, prompt=prompts, max_tokens=8, n=2, temperature=0.8, seed=5
    )
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=8, n=2)
    want = [o.text for r in reference.generate(prompts, params) for o in r.outputs]
    assert [c.index for c in found.choices] == [0, 1, 2, 3]
    assert [c.text for c in found.choices] == want
    streamed = [""] * 4
    for chunk in lenient.completions.create(
        model=MODEL, prompt=prompts, max_tokens=8, n=2, temperature=0.8, seed=5, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == want


def test_token_ids_are_prompts_too(client, reference):
    ids = reference.tokenizer.encode(PROMPT)
    one = client.completions.create(model=MODEL, prompt=ids, max_tokens=8)
    two = client.completions.create(model=MODEL, prompt=[ids, ids], max_tokens=8)
    text = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8).choices[0].text
    assert [c.text for c in one.choices + two.choices] == [text] * 3


def test_a_stop_string_ends_the_text_before_it(lenient, reference):
    whole = reference.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=24))[0]
    text = whole.outputs[0].text
    stop = text[10:13]
    found = lenient.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, stop=stop)
    assert found.choices[0].text == text[: text.index(stop)]
    assert found.choices[0].finish_reason == "stop"
    assert found.choices[0].stop_reason == stop
    pieces = [
        chunk.choices[0].text
        for chunk in lenient.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=24, stop=[stop, "\0"], stream=True
        )
    ]
    assert "".join(pieces) == text[: text.index(stop)]


@pytest.mark.soak
def test_processed_logprobs_are_those_of_what_may_be_drawn(client):
    """Of one id alone here, so each is drawn with certainty."""
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "logprobs": 0, "temperature": 0.7}
    for mode, is_certain in (("processed_logprobs", True), ("raw_logprobs", False)):
        body = {"top_k": 1, "logprobs_mode": mode}
        (choice,) = client.completions.create(**asked, extra_body=body).choices
        assert (choice.logprobs.token_logprobs == [0.0] * 4) == is_certain


@pytest.mark.soak
def test_logprobs_are_lists_beside_each_other(client, reference):
    found = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, logprobs=2)
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
    (want,) = reference.generate(PROMPT, params)[0].outputs
    told = found.choices[0].logprobs
    assert "".join(told.tokens) == want.text == found.choices[0].text
    own = [place[token].logprob for token, place in zip(want.token_ids, want.logprobs, strict=True)]
    assert told.token_logprobs == pytest.approx(own, abs=1e-4)
    offsets = [len("".join(told.tokens[:n])) for n in range(8)]
    assert told.text_offset == offsets
    for token, logprob, top in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, strict=True
    ):
        assert len(top) == 2 and top[token] == logprob == max(top.values())  # greedy


@pytest.mark.soak
def test_echo_with_logprobs_scores_the_prompt_as_lm_eval_asks(lenient, reference):
    ids = reference.tokenizer.encode(PROMPT)
    (want,) = reference.score([{"prompt_token_ids": ids}])
    for most, new in ((0, 0), (1, 1)):
        found = lenient.completions.create(
            model=MODEL, prompt=[ids], max_tokens=most, echo=True, logprobs=1, temperature=0
        )
        told = found.choices[0].logprobs
        assert len(told.tokens) == len(ids) + new == len(told.top_logprobs)
        assert told.token_logprobs[0] is None
        assert told.token_logprobs[1 : len(ids)] == pytest.approx(want.token_logprobs[1:], abs=1e-4)
        assert found.choices[0].text.startswith(PROMPT)
        assert found.usage.completion_tokens == new
        if not most:
            assert found.choices[0].text == PROMPT
            assert "".join(told.tokens) == PROMPT


def test_echoed_text_comes_first_in_a_stream(lenient):
    pieces = lenient.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4, echo=True, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in pieces)
    plain = lenient.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4).choices[0].text
    assert text == PROMPT + plain


@pytest.mark.soak
def test_vllm_s_extra_fields_are_told(client, reference):
    found = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=4,
        extra_body={"return_token_ids": True, "prompt_logprobs": 1, "top_k": 5, "min_tokens": 2},
    )
    choice = found.choices[0]
    assert choice.prompt_token_ids == reference.tokenizer.encode(PROMPT)
    assert reference.tokenizer.decode(choice.token_ids) == choice.text
    first, *others = choice.prompt_logprobs
    assert first is None and all("logprob" in x for place in others for x in place.values())


def test_what_is_not_given_is_the_checkpoint_s(served, client):
    served_default = served.llm.get_default_sampling_params()
    assert served_default.temperature == 0.0  # the embedded model's generation_config.json
    one, two = (
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8).choices[0].text
        for _ in range(2)
    )
    assert one == two


def test_without_max_tokens_the_room_is_used(client, reference):
    ids = reference.tokenizer.encode(PROMPT) * 80
    ids = ids[:500]
    found = client.completions.create(model=MODEL, prompt=ids, extra_body={"ignore_eos": True})
    assert found.usage.total_tokens == 512 and found.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        ({"temperature": -1}, "temperature must be a number from 0"),
        ({"n": 129}, "n must be at most 128, got 129"),
        ({"stop": ["a"] * 17}, "stop must be at most 16 strings, got 17"),
        ({"logprobs": 21}, "logprobs must be at most 20"),
        ({"best_of": 3}, "best_of can't be 3: every sample is answered"),
        ({"suffix": "x"}, "suffix can't be 'x'"),
        ({"prompt": []}, "prompt must hold at least one prompt"),
        ({"prompt": ""}, "A prompt must have at least one token"),
        ({"prompt": [[1, -5]]}, "prompt"),
        ({"prompt": [1, 10**9]}, "prompt"),
        ({"logit_bias": {"x": 1}}, "logit_bias must have token ids as keys, got 'x'"),
        ({"stream_options": {"include_usage": True}}, "it goes with stream=true"),
        ({"extra_body": {"guided_json": {"not": {}}}}, "guided_json must be"),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex must be"),
        ({"extra_body": {"structured_outputs": {"choice": []}}}, "choice must be"),
        ({"extra_body": {"structured_outputs": {"grammar": "start: x"}}}, "structured_outputs"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search can't be True"),
        ({"extra_body": {"max_token": 3}}, "there is no field 'max_token'; the nearest is"),
        ({"extra_body": {"top_k": "many"}}, "top_k must be a valid integer, got 'many'"),
        ({"extra_body": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens must be"),
        ({"extra_body": {"vllm_xargs": {"a": 1}}}, "vllm_xargs must be of this engine's logits"),
        ({"extra_body": {"vllm_xargs": {"modulus": 1}}}, "vllm_xargs must have all of modulus"),
        (
            {"extra_body": {"vllm_xargs": {"modulus": 0, "offset": 1}}},
            "vllm_xargs['modulus'] must be at least 1",
        ),
        ({"extra_body": {"vllm_xargs": {"a": {}}}}, "vllm_xargs['a'] must be"),
        ({"prompt": "x " * 600}, "max_model_len=512"),
    ],
)
def test_bad_input_is_a_400_that_names_the_field(client, served, fields, said):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": MODEL, "prompt": PROMPT, **fields})
    error = caught.value.body
    assert said in error["message"], error
    assert error["type"] == "BadRequestError"
    assert error["code"] == ("context_length_exceeded" if "too long" in error["message"] else 400)
    name = next(iter(fields.get("extra_body", fields)))
    if error["message"].startswith(name):
        assert error["param"] == name
    assert served.llm.num_running == served.llm.num_waiting == 0


@pytest.mark.soak
def test_logits_processors_read_their_arguments(lenient, served):
    """Of token ids too, with and without a stream."""
    args, hosted = {"modulus": 7, "offset": 3}, {"host_modulus": 7, "host_offset": 3}
    for xargs in (args, hosted):
        sizes = {"max_tokens": 12, "ignore_eos": True}
        body = {"vllm_xargs": xargs, "return_token_ids": True, **sizes}
        found = served.post("/v1/completions", prompt=[5, 6], **body).json()
        assert found["choices"][0]["token_ids"] == walk([5, 6], 12, 7, 3)
        of_vllm = {"token_ids": [5, 6], "sampling_params": {"extra_args": xargs, **sizes}}
        found = served.post("/inference/v1/generate", **of_vllm).json()
        assert found["choices"][0]["token_ids"] == walk([5, 6], 12, 7, 3)
    prompt = served.llm.tokenizer.encode("a b")
    extra = {"vllm_xargs": args, "ignore_eos": True, "skip_special_tokens": False}
    stream = lenient.completions.create(
        model=MODEL, prompt="a b", max_tokens=9, stream=True, extra_body=extra
    )
    text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert text == served.llm.tokenizer.decode(walk(prompt, 9, 7, 3), skip_special_tokens=False)


def test_another_model_s_name_is_a_404(client):
    with pytest.raises(openai.NotFoundError, match="model must be 'short', got 'gpt-4'"):
        client.completions.create(model="gpt-4", prompt=PROMPT)


@pytest.mark.soak
def test_a_sample_that_ends_before_the_first_one_is_told_the_prompt_s_logprobs_too(
    served, reference
):
    fields = {"n": 3, "max_tokens": 12, "temperature": 1.5, "stop": ["e"]}

    def lengths(seed):
        (found,) = reference.generate(PROMPT, SamplingParams(**fields, seed=seed), use_tqdm=False)
        return [len(each.token_ids) for each in found.outputs]

    seed = next(seed for seed in range(100) if min(lengths(seed)[1:]) < lengths(seed)[0])
    found = served.post(
        "/v1/completions", prompt=PROMPT, **fields, seed=seed, echo=True, logprobs=0
    )
    assert found.status_code == 200, found.text
    num_prompt = len(reference.tokenizer.encode(PROMPT))
    first, *others = [each["logprobs"] for each in found.json()["choices"]]
    for other in others:
        assert other["token_logprobs"][:num_prompt] == first["token_logprobs"][:num_prompt]
        assert other["tokens"][:num_prompt] == first["tokens"][:num_prompt]
    assert None not in first["token_logprobs"][1:]


class _WithBos(TemplateTokenizer):
    """Puts the id 0 before texts."""

    def encode(self, text, add_special_tokens=True, max_model_len=None):
        return [0] * add_special_tokens + super().encode(text, False, max_model_len)


def test_special_tokens_and_the_side_of_truncation_are_the_request_s():
    made = ScriptedLLM([" "], "")
    made.tokenizer = _WithBos(EMBEDDED_MODEL, "")
    ids = made.tokenizer.encode(PROMPT, add_special_tokens=False)
    assert len(ids) > 3
    cases = [
        ({}, PROMPT),
        ({"add_special_tokens": True, "truncation_side": "left"}, PROMPT),
        ({"add_special_tokens": False}, ids),
        ({"add_special_tokens": False, "truncate_prompt_tokens": 3}, ids[-3:]),
        ({"truncation_side": "right"}, [0, *ids]),
        ({"truncation_side": "right", "truncate_prompt_tokens": 3}, [0, *ids[:2]]),
        (
            {"truncation_side": "right", "truncate_prompt_tokens": -1, "max_tokens": 4094},
            [0, ids[0]],
        ),
    ]
    with serving(lambda: made) as served:
        for fields, want in cases:
            assert served.post("/v1/completions", prompt=PROMPT, **fields).status_code == 200
            assert made.asked["prompt"] == want, fields


@pytest.mark.soak
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_tokens_of_logprobs_may_be_named_by_their_ids(served, path):
    fields = {"max_tokens": 4, "return_tokens_as_token_ids": True, "return_token_ids": True}
    if path == "/v1/completions":
        (choice,) = served.post(path, prompt=PROMPT, logprobs=1, **fields).json()["choices"]
        found = choice["logprobs"]["tokens"]
    else:
        messages = [{"role": "user", "content": "Hi"}]
        told = served.post(path, messages=messages, logprobs=True, **fields).json()
        (choice,) = told["choices"]
        found = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert found == [f"token_id:{token}" for token in choice["token_ids"]]
