"""Requests as users send them, a line each, and whether an output has what its request asks for."""

import dataclasses
import math
import re
from typing import Any

from benchmarks.acceptance.processors import follows
from benchmarks.measure.words import word
from jaxspec import RequestOutput, SamplingParams
from jaxspec.requests.outputs import CompletionOutput

BAD = 60, 61, 62
STOPS = tuple(range(100, 400, 3))  # ids, of which a random model draws one now and then
ALLOWED = tuple(range(40, 72))
SAMPLED = {"temperature": 0.8}
AS_DRAWN = {"logprobs_mode": "processed_logprobs"}
NESTED = 'start: " a" | " b" start " c"'  # no automaton has its language
ENDS = {"ignore_eos": False}


@dataclasses.dataclass(frozen=True)
class Feature:
    """A kind of request; `params` None means the model's published defaults.

    The requests of a batch have the features of `mixes` in turn.
    """

    name: str
    params: dict[str, Any] | None = None
    mixes: "tuple[Feature, ...]" = ()


GREEDY = Feature("greedy", {"temperature": 0.0})
DEFAULTS = Feature("published defaults", None)
FEATURES = (
    GREEDY,
    DEFAULTS,
    Feature("temperature", SAMPLED),
    Feature("top_k=20", SAMPLED | {"top_k": 20}),
    Feature("top_k=1000", SAMPLED | {"top_k": 1000}),
    Feature("top_p=0.9", SAMPLED | {"top_p": 0.9}),
    Feature("min_p=0.05", SAMPLED | {"min_p": 0.05}),
    Feature("presence_penalty", SAMPLED | {"presence_penalty": 1.0}),
    Feature("frequency_penalty", SAMPLED | {"frequency_penalty": 1.0}),
    Feature("repetition_penalty", SAMPLED | {"repetition_penalty": 1.2}),
    Feature("logit_bias", {"temperature": 0.0, "logit_bias": {50: 2.0, 51: -2.0}}),
    Feature("allowed_token_ids", {"temperature": 0.0, "allowed_token_ids": list(ALLOWED)}),
    Feature("bad_words", SAMPLED | {"bad_words": [word(id) for id in BAD]}),
    Feature("min_tokens", {"temperature": 0.0, "min_tokens": 8, "ignore_eos": False}),
    Feature("stop ids", SAMPLED | {"stop_token_ids": list(STOPS)}),
    Feature("stop strings", SAMPLED | {"stop": [word(id) for id in BAD]}),
    Feature("seed", SAMPLED | {"seed": 7}),
    Feature("n=2", SAMPLED | {"n": 2}),
    Feature("regex", SAMPLED | {"structured_outputs": {"regex": "( [a-e]{1,2}){4,8}"}} | ENDS),
    Feature("grammar", SAMPLED | {"structured_outputs": {"grammar": NESTED}} | ENDS),
    Feature("logprobs=5", {"temperature": 0.0, "logprobs": 5}),
    Feature("processed logprobs", SAMPLED | {"top_k": 20, "logprobs": 20} | AS_DRAWN),
    Feature("prompt_logprobs=1", {"temperature": 0.0, "prompt_logprobs": 1}),
)
EVERYTHING = Feature(
    "all in each request",
    {
        **SAMPLED,
        "top_k": 1000,
        "top_p": 0.9,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {50: 2.0, 51: -2.0},
        "bad_words": [word(id) for id in BAD],
        "logprobs": 5,
        "prompt_logprobs": 1,
    },
)
TWO_IDS = Feature("all and two ids", EVERYTHING.params | {"allowed_token_ids": [40, 41]})
MIXED = Feature("each in a row of one batch", mixes=FEATURES)
FEW_MIXED = Feature("the three in one batch", mixes=(GREEDY, DEFAULTS, EVERYTHING))
PROCESSED = Feature(
    "on the device, on the host and none in one batch",
    mixes=(
        Feature("on the device", SAMPLED | {"extra_args": {"step": 3}}),
        Feature("on the host", SAMPLED | {"extra_args": {"host_step": 5}}),
        GREEDY,
    ),
)
FULL_TABLE = (*FEATURES, EVERYTHING, MIXED)
SHORT_TABLE = (GREEDY, DEFAULTS, EVERYTHING, FEW_MIXED)


def params_of(
    feature: Feature, count: int, tokens: int, defaults: SamplingParams
) -> list[SamplingParams]:
    """Parameters of `count` requests, for `tokens` new tokens each where nothing stops them."""
    kinds = feature.mixes or (feature,)
    return [_params(kinds[i % len(kinds)], tokens, defaults) for i in range(count)]


def samples_of(feature: Feature) -> int:
    """Samples per request."""
    return (feature.params or {}).get("n", 1)


def _params(feature: Feature, tokens: int, defaults: SamplingParams) -> SamplingParams:
    given = {"max_tokens": tokens, "ignore_eos": True, **(feature.params or {})}
    if "min_tokens" in given:
        given["min_tokens"] = min(given["min_tokens"], tokens)
    if feature.params is None:
        return dataclasses.replace(defaults, **given)
    return SamplingParams(**given)


def violation(params: SamplingParams, output: RequestOutput, vocab: int) -> str | None:
    """Describe the first promise of `params` that `output` breaks; None if it keeps all."""
    if len(output.outputs) != params.n:
        return f"{len(output.outputs)} samples of {params.n}"
    if params.prompt_logprobs is not None:
        found = output.prompt_logprobs or []
        if len(found) != len(output.prompt_token_ids) or not all(found[1:]):
            return "prompt_logprobs are missing"
    samples, prompt = output.outputs, output.prompt_token_ids
    if params.extra_args and not all(
        follows(prompt, each.token_ids, params.extra_args) for each in samples
    ):
        return "tokens other than those of its logits processor"
    for sample in samples:
        routed = sample.routed_experts
        if routed is not None and len(routed) != len(prompt) + len(sample.token_ids) - 1:
            return f"{len(routed)} tokens with routed experts"
    return next((why for each in samples if (why := _broken(params, each, vocab))), None)


def _broken(params: SamplingParams, sample: CompletionOutput, vocab: int) -> str | None:
    ids, stops = sample.token_ids, set(params.stop_token_ids or ())
    promises = {
        f"the end is {sample.finish_reason!r}": sample.finish_reason in ("length", "stop"),
        f"{len(ids)} tokens with the end 'length'": sample.finish_reason != "length"
        or len(ids) == params.max_tokens,
        "an id outside the vocabulary": all(0 <= id < vocab for id in ids),
        "an id that is not allowed": not params.allowed_token_ids
        or set(ids) <= set(params.allowed_token_ids),
        "a bad word": not params.bad_words or not set(ids) & set(BAD),
        f"{len(ids)} tokens, fewer than min_tokens": len(ids) >= params.min_tokens,
        "text of another form": sample.finish_reason != "stop" or _has_form(params, sample.text),
        "tokens after a stop id": not stops & set(ids[:-1]),
        "text after a stop string": not any(stop in sample.text for stop in params.stop or ()),
        "logprobs are missing": params.logprobs is None
        or [len(entry) >= params.logprobs for entry in sample.logprobs or ()] == [True] * len(ids),
        "processed logprobs of another mass than 1": _has_mass(params, sample),
    }
    return next((why for why, is_kept in promises.items() if not is_kept), None)


def _has_mass(params: SamplingParams, sample: CompletionOutput) -> bool:
    """Return whether processed logprobs of all ids that may be drawn have a mass of 1."""
    is_processed = params.logprobs_mode == AS_DRAWN["logprobs_mode"]
    if not is_processed or not 0 < params.top_k <= (params.logprobs or 0):
        return True
    masses = [sum(math.exp(x.logprob) for x in each.values()) for each in sample.logprobs or ()]
    return all(abs(mass - 1) < 1e-3 for mass in masses)


def _has_form(params: SamplingParams, text: str) -> bool:
    """Return whether a whole text has the form that its request asks for."""
    form = params.structured_outputs
    if form is None:
        return True
    if form.regex is not None:
        return re.fullmatch(form.regex, text) is not None
    depth = text.count(" b")
    return text == " b" * depth + " a" + " c" * depth
