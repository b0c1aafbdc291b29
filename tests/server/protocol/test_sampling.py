"""Fields that choose tokens become `SamplingParams`; what can't be done is refused by name."""

import dataclasses

import pytest
from pydantic import ValidationError

from jaxspec.requests.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.server.http.errors import ApiError
from jaxspec.server.protocol import ChatCompletionRequest, CompletionRequest, Sampling

DEFAULT = SamplingParams(temperature=0.7, top_k=20)


def test_what_is_given_counts_and_the_rest_is_the_default():
    given = {"top_p": 0.5, "seed": 3, "stop": ["a"], "top_k": None, "logit_bias": {"5": -1}}
    found = Sampling(**given).sampling_params(DEFAULT, 9, 2)
    want = SamplingParams(
        temperature=0.7,
        top_k=20,
        top_p=0.5,
        seed=3,
        stop=["a"],
        logit_bias={5: -1},
        max_tokens=9,
        logprobs=2,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    assert found == want


def test_a_stream_comes_in_pieces_and_a_whole_answer_in_one():
    kinds = {True: RequestOutputKind.DELTA, False: RequestOutputKind.FINAL_ONLY}
    for streams, kind in kinds.items():
        found = Sampling(stream=streams).sampling_params(DEFAULT, 1, None)
        assert found.output_kind is kind


def test_every_field_of_the_parameters_can_be_asked_for_or_is_the_server_s():
    own = {"max_tokens", "logprobs", "logit_bias", "detokenize", "output_kind"}
    own |= {"structured_outputs"}  # test_structure.py
    own |= {"extra_args"}  # vLLM's field has another name
    own |= {"routed_experts_prompt_start"}  # of the one route that returns experts
    names = {field.name for field in dataclasses.fields(SamplingParams)} - own
    assert names <= set(Sampling.model_fields)
    for name in names:
        default = getattr(SamplingParams(), name)
        given = {"stop": ["x"], "bad_words": ["x"], "allowed_token_ids": [1]}.get(name)
        given = "processed_logprobs" if name == "logprobs_mode" else given
        given = given or ([7] if name == "stop_token_ids" else None)
        if given is None:
            is_flag, is_ratio = isinstance(default, bool), isinstance(default, float)
            given = (not default) if is_flag else 0.5 if is_ratio else 2
        found = Sampling(**{name: given}).sampling_params(DEFAULT, None, None)
        assert getattr(found, name) == given, name


def test_xargs_are_extra_args():
    xargs = {"a": 1, "b": [2.5, "x"]}
    found = ChatCompletionRequest(messages=[], vllm_xargs=xargs)
    assert found.sampling_params(DEFAULT, None, None).extra_args == xargs
    with pytest.raises(ValueError, match=r"extra_args\['a'\] must be"):
        Sampling(vllm_xargs={"a": {}}).sampling_params(DEFAULT, None, None)


@pytest.mark.parametrize(
    "name, value",
    [
        ("structural_tag", {}),
        ("prompt_embeds", "x"),
        ("logits_processors", ["os.system"]),
        ("stream_options", {"include_usage": True}),
        ("logprob_token_ids", [3]),
        ("repetition_detection", {"max_pattern_size": 4}),
        ("stream_interval", 8),
    ],
)
def test_what_is_known_and_can_t_be_done_is_refused_by_name(name, value):
    with pytest.raises(ApiError) as caught:
        Sampling(**{name: value}).refuse_absent()
    assert caught.value.status == 400 and caught.value.param == name
    assert caught.value.message.startswith(f"{name} can't be ")


def test_what_asks_for_nothing_is_taken():
    Sampling(
        response_format={"type": "text"}, structural_tag=None, stream_options=None
    ).refuse_absent()
    Sampling(use_beam_search=False, logits_processors=[]).refuse_absent()
    Sampling(include_reasoning=True, truncation_side="left", stream_interval=None).refuse_absent()
    ChatCompletionRequest(messages=[], top_logprobs=0, logprobs=False).refuse_absent()


def test_a_chat_s_special_tokens_and_its_end_are_the_template_s():
    for fields in ({"add_special_tokens": True}, {"truncation_side": "right"}):
        with pytest.raises(ApiError) as caught:
            ChatCompletionRequest(messages=[], **fields).refuse_absent()
        assert caught.value.param in fields
        CompletionRequest(prompt="a", **fields).refuse_absent()


def test_fields_of_other_servers_are_no_misspellings():
    for name in ("models", "repetition_penalty_range", "frequency_penalty_range", "top_a"):
        Sampling.model_validate({name: 1})
    for name in ("max_token", "stop_token_id", "temprature"):
        with pytest.raises(ValidationError, match="there is no field"):
            Sampling.model_validate({name: 1})
