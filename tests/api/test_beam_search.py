"""Beam search against a brute-force one in NumPy, and on the engine."""

import dataclasses
import math

import numpy as np
import pytest
from harness import FIXTURES, oracle
from logprobs import NEAR, exact

from jaxspec import LLM, BeamSearchParams
from jaxspec.api.beam_search import MAX_BEAM_WIDTH, BeamSearchSequence, search
from jaxspec.requests.logprobs import Logprob
from jaxspec.requests.outputs import CompletionOutput
from jaxspec.requests.request import RequestMetrics
from jaxspec.requests.sampling_params import PROCESSED

FIXTURE = "qwen3"
PROMPTS = [[5, 6, 7], [9], [100, 3, 3, 100, 3]]
OPTIONS = {"max_num_seqs": 4, "decode_buckets": [4], "prefill_buckets": [32], "max_model_len": 40}


def brute_force(prompt, width, length, penalty, eos_ids, logprobs_after):
    """All continuations of the kept beams are laid out, and the best of them are kept."""
    beams, ended = [(0.0, prompt)], []
    for _ in range(length):
        offered = []
        for total, tokens in beams:
            row = logprobs_after(tokens)
            for token in np.argsort(-row, kind="stable")[: 2 * width].tolist():
                offered.append((total + row[token], [*tokens, token]))
        ended += [(t / (len(x) - 1) ** penalty, x) for t, x in offered if x[-1] in eos_ids]
        offered = [(t, x) for t, x in offered if x[-1] not in eos_ids]
        beams = sorted(offered, key=lambda beam: beam[0] / len(beam[1]) ** penalty)[::-1][:width]
    ended += [(total / len(tokens) ** penalty, tokens) for total, tokens in beams]
    return sorted(ended, key=lambda beam: beam[0])[::-1][:width]


# With made-up probabilities.


def made_up(tokens, vocab=30):
    random = np.random.default_rng([len(tokens), *tokens])
    scores = random.normal(size=vocab) * 2
    return scores - np.log(np.exp(scores).sum())


def completion(logprobs, reason="length"):
    ids = [next(iter(entry)) for entry in logprobs]
    return CompletionOutput(0, "", ids, reason, RequestMetrics(), logprobs=logprobs)


def next_of_made_up(width):
    def next_tokens(beams):
        entries = []
        for tokens in beams:
            row = made_up(tokens)
            best = np.argsort(-row, kind="stable")[: 2 * width].tolist()
            entries.append({token: Logprob(row[token], 1 + i) for i, token in enumerate(best)})
        return [completion([entry]) for entry in entries]

    return next_tokens


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5, -0.5])
@pytest.mark.parametrize("eos_ids", [(), (3, 4)], ids=["endless", "with ends"])
def test_it_finds_what_a_brute_force_search_finds(width, penalty, eos_ids):
    params = BeamSearchParams(width, 6, length_penalty=penalty)
    found = search(next_of_made_up(width), PROMPTS, params, eos_ids)
    for prompt, best in zip(PROMPTS, found, strict=True):
        want = brute_force(prompt, width, 6, penalty, eos_ids, made_up)
        assert [beam.tokens for beam in best] == [tokens for _, tokens in want]
        for beam, (score, tokens) in zip(best, want, strict=True):
            assert math.isclose(beam.score(penalty), score)
            is_ended = tokens[-1] in eos_ids
            assert beam.finish_reason == ("stop" if is_ended else "length")
            assert beam.stop_reason == (tokens[-1] if is_ended else None)
            own = [
                entry[t].logprob
                for t, entry in zip(tokens[len(prompt) :], beam.logprobs, strict=True)
            ]
            assert math.isclose(sum(own), beam.cum_logprob)


def test_a_beam_that_fails_ends_and_the_others_go_on():
    def next_tokens(beams):
        outputs = next_of_made_up(2)(beams)
        failed = completion([], "error")
        return [
            failed if len(x) == 2 and x[0] == 9 else y for x, y in zip(beams, outputs, strict=True)
        ]

    first, second = search(next_tokens, [[9], [7]], BeamSearchParams(2, 4), ())
    assert [beam.finish_reason for beam in first] == ["error"] * 2
    assert [len(beam.tokens) for beam in first + second] == [2, 2, 5, 5]


# On an engine.


@pytest.fixture(scope="module")
def llm():
    with LLM(FIXTURES / FIXTURE, dtype="float32", **OPTIONS) as llm:
        yield llm


@pytest.mark.soak
def test_an_llm_finds_what_a_search_with_the_oracle_finds(llm):
    def logprobs_after(tokens):
        return exact(FIXTURE, (*tokens, 0))[-1]

    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.beam_search(prompts, BeamSearchParams(3, 4, ignore_eos=True))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        want = brute_force(prompt, 3, 4, 1.0, (), logprobs_after)
        scores = [beam.score(1.0) for beam in output.sequences]
        np.testing.assert_allclose(scores, [score for score, _ in want], atol=NEAR)
        for beam, (_, tokens) in zip(output.sequences, want, strict=True):
            assert beam.tokens == tokens and beam.finish_reason == "length"
            assert beam.text is None  # the fixture has no tokenizer
    assert oracle(FIXTURE).config["vocab_size"] > max(map(max, PROMPTS))


@pytest.mark.soak
def test_beams_are_ranked_by_the_model_whatever_the_engine_reports(llm, monkeypatch):
    prompt = {"prompt_token_ids": PROMPTS[0]}
    params = BeamSearchParams(2, 3, ignore_eos=True, temperature=0.3)
    (raw,) = llm.beam_search(prompt, params)
    monkeypatch.setattr(llm.inputs, "_logprobs_mode", PROCESSED)
    (found,) = llm.beam_search(prompt, params)
    for beam in (*raw.sequences, *found.sequences):
        own = exact(FIXTURE, tuple(beam.tokens))[np.arange(3, 6), beam.tokens[3:]]
        assert abs(beam.cum_logprob - own.sum()) < 4 * NEAR


@pytest.mark.soak
def test_the_end_tokens_are_the_model_s(llm):
    """The first token that would be chosen becomes an end: every sequence has it or passes by."""
    prompt = {"prompt_token_ids": PROMPTS[0]}
    (free,) = llm.beam_search(prompt, BeamSearchParams(2, 3, ignore_eos=True))
    own, llm.inputs.eos_ids = llm.inputs.eos_ids, (free.sequences[0].tokens[3],)
    try:
        (output,) = llm.beam_search(prompt, BeamSearchParams(2, 3))
    finally:
        llm.inputs.eos_ids = own
    reasons = {len(beam.tokens): beam.finish_reason for beam in output.sequences}
    assert reasons[4] == "stop"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam_width": 0}, "beam_width must be an integer of at least 1, got 0"),
        ({"beam_width": MAX_BEAM_WIDTH + 1}, "beam_width must be at most 10, got 11; each beam"),
        ({"beam_width": 2.0}, "beam_width must be an integer of at least 1, got 2.0"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        ({"max_tokens": None}, "max_tokens must be an integer of at least 1, got None"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"temperature": -1}, "temperature must be a number from 0 .* got -1"),
        ({"length_penalty": math.nan}, "length_penalty must be a number from -10 to 10, got nan"),
        ({"length_penalty": "long"}, "length_penalty must be a number .* got 'long'; 0 takes"),
        ({"length_penalty": 1000}, "length_penalty must be a number from -10 to 10, got 1000; 0"),
    ],
)
def test_bad_params_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BeamSearchParams(2, 4), **changes)


def test_bad_calls_are_refused_before_anything_runs(llm, monkeypatch):
    monkeypatch.setattr(llm._compiler, "ensure", lambda *_: None)  # takes seconds for no step
    steps = llm.metrics()["num_steps"]
    with pytest.raises(ValueError, match="params must be BeamSearchParams, got 3. Build them"):
        llm.beam_search([{"prompt_token_ids": [1]}], 3)
    with pytest.raises(ValueError, match="leaves room for 37 tokens, and max_tokens is 38"):
        llm.beam_search([{"prompt_token_ids": [1, 2, 3]}], BeamSearchParams(2, 38))
    with pytest.raises(ValueError, match="A prompt must have at least one token"):
        llm.beam_search([{"prompt_token_ids": []}], BeamSearchParams(2, 3))
    assert llm.metrics()["num_steps"] == steps


def test_lengths_are_taken_account_of_by_the_penalty():
    short = BeamSearchSequence([1, 2], [], cum_logprob=-2.0)
    ended = BeamSearchSequence([1, 2, 0], [], cum_logprob=-2.0, stop_reason=0)
    assert short.score(0.0) == -2.0 and short.score(1.0) == ended.score(1.0) == -1.0
