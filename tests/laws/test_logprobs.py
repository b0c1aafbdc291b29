"""Logprobs of every emitted token and of prompts: the model's own log-softmax, however they came.

Each is compared with what the one-request oracle gives for the whole text in float64.
"""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from harness import GREEDY, REPLAY, SAMPLED, Harness, prompts
from logprobs import check_logprobs
from pairwise import soak
from walk import PROMPTS, random_walk, walk_harness

from jaxspec.engine import engine as engine_module
from jaxspec.options.draft_methods import NgramOptions
from jaxspec.requests.request import Finish
from jaxspec.runner import logprobs as logprobs_module
from jaxspec.runner import verify as verify_module

REPORTED = {"logprobs": 5, "prompt_logprobs": 2, "max_tokens": 14}
GREEDY_REPORTED = dataclasses.replace(GREEDY, **REPORTED)
TOP_K_REPORTED = dataclasses.replace(SAMPLED, top_k=20, **REPORTED)
DEPTHS_AND_CHUNKS = [(0, 1), (1, 7), (2, 64), (3, 7)]
LONG = prompts(5, seed=9, longest=40)


def run(engine, params, others=(GREEDY,)):
    """Requests that report beside some that don't, which come at any time."""
    rng = np.random.default_rng(1)
    for number, (prompt, one) in enumerate(zip(LONG, itertools.cycle([params, *others]))):
        engine.add(prompt, one, seed=number)
        for _ in range(rng.integers(0, 3)):
            engine.step()
    return engine.run()


ENGINES = {
    "mtp 3, replayed": {"drafts": 3, "states": REPLAY},
    "mtp 2, two steps a dispatch": soak({"drafts": 2, "steps_per_dispatch": 2}),
    "no drafts": soak({}),
    "ngram 1": soak({"drafts": 1, "method": "ngram", "options": NgramOptions()}),
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_greedy_rows_report_the_model_s_own_logprobs(options):
    """And give the tokens that they give without, as do their neighbours."""
    for depth, chunk in DEPTHS_AND_CHUNKS:
        feature_sets = GREEDY.features, GREEDY_REPORTED.features
        engine = Harness(max_in_flight=depth, chunk=chunk, feature_sets=feature_sets, **options)
        run(engine, GREEDY_REPORTED)
        assert engine.check() <= 1
        num_output, num_prompt = check_logprobs(engine)
        assert num_output == 3 * 14
        assert num_prompt == sum(len(prompt) - 1 for prompt in LONG[::2])


@pytest.mark.soak
def test_temperature_and_top_k_do_not_show():
    for depth, chunk in DEPTHS_AND_CHUNKS:
        feature_sets = (TOP_K_REPORTED.features,)
        engine = Harness(drafts=3, max_in_flight=depth, chunk=chunk, feature_sets=feature_sets)
        run(engine, TOP_K_REPORTED, [TOP_K_REPORTED])
        assert engine.check() <= 1
        assert check_logprobs(engine)[0] == 5 * 14


@pytest.mark.soak
def test_drawn_drafts_report_the_target_s_logprobs():
    params = dataclasses.replace(SAMPLED, **REPORTED)
    engine = Harness(drafts=3, probabilistic=True, chunk=7, feature_sets=(params.features,))
    run(engine, params, [params])
    assert check_logprobs(engine)[0] == 5 * 14
    assert sum(r.metrics.num_accepted_tokens for r in engine.requests) > 0


@pytest.mark.soak
def test_forks_aborts_and_preemptions_lose_none():
    """A request that is preempted reads its prompt and its output again, as a prompt."""
    params = GREEDY_REPORTED, GREEDY
    engine = walk_harness((0.7, 0.6, 0.5), feature_sets=[one.features for one in params], chunk=7)
    happened = random_walk(engine, 160, seed=5, params=params)
    assert min(happened[event] for event in ("abort", "preempt", "permute")) > 0
    assert any(request.parent for request in engine.requests)
    assert engine.check() <= 1
    num_output, num_prompt = check_logprobs(engine)
    assert num_output > 100 and num_prompt > 50


@pytest.mark.soak
def test_one_token_has_nothing_before_it():
    engine = Harness(feature_sets=(GREEDY_REPORTED.features, GREEDY.features))
    engine.add((5,), GREEDY_REPORTED)
    engine.run()
    assert check_logprobs(engine) == (14, 0)


@pytest.mark.soak
def test_an_end_in_a_verify_ends_the_logprobs():
    """A stop id among the drafts that stand: what the verify computed behind it never shows."""
    feature_sets = GREEDY.features, GREEDY_REPORTED.features
    engine = walk_harness((1.0, 1.0, 1.0), feature_sets=feature_sets)
    (whole,) = engine.add(PROMPTS[0], GREEDY_REPORTED)
    engine.run()
    for stop in dict.fromkeys(whole.output):
        engine.add(PROMPTS[0], GREEDY_REPORTED, stop_ids=(stop,))
    engine.run()
    assert engine.check() <= 1
    assert sum(request.finish == Finish.STOP for request in engine.requests) > 2
    check_logprobs(engine)


# Planted bugs.

real_emitted, real_next_tokens = verify_module.emitted_logprobs, logprobs_module.next_tokens
real_record = engine_module.record_logprobs


def one_place_late(*args):
    reported = real_emitted(*args)
    return None if reported is None else jnp.roll(reported, 1, axis=1)


def without_a_chunk_s_border(inputs, acceptance):
    """The last token of a chunk is followed by what the step drew there, not by the prompt."""
    unknown = jnp.full_like(inputs.next_prefill_token, -1)
    return real_next_tokens(dataclasses.replace(inputs, next_prefill_token=unknown), acceptance)


def of_rejected_places(step, output):
    """Each verify gives as many as it had places."""
    every = np.where(output.num_drafts[:, :, None] >= np.arange(output.tokens.shape[2]), 0, -1)
    real_record(step, dataclasses.replace(output, tokens=every))


def from_the_chunk_s_first_token(step, output):
    """A prompt token's own place, not the one before it."""
    if output.prompt_logprobs is not None:
        late = np.roll(output.prompt_logprobs, -1, axis=1)
        output = dataclasses.replace(output, prompt_logprobs=late)
    real_record(step, output)


DEVICE_BUGS = [
    (verify_module, "emitted_logprobs", one_place_late),
    (logprobs_module, "next_tokens", without_a_chunk_s_border),
]
HOST_BUGS = [of_rejected_places, from_the_chunk_s_first_token]


def assert_the_oracle_sees_it():
    engine = Harness(drafts=3, chunk=7, states=REPLAY, feature_sets=(GREEDY_REPORTED.features,))
    run(engine, GREEDY_REPORTED, [GREEDY_REPORTED])
    assert engine.check() <= 1, "tokens are what they were"
    with pytest.raises(AssertionError):
        check_logprobs(engine)


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize("bug", HOST_BUGS, ids=lambda bug: bug.__name__)
def test_the_oracle_sees_on_the_host(bug, monkeypatch):
    monkeypatch.setattr(engine_module, "record_logprobs", bug)
    assert_the_oracle_sees_it()


@pytest.mark.soak
@pytest.mark.parametrize("module, name, bug", DEVICE_BUGS, ids=lambda x: getattr(x, "__name__", ""))
def test_the_oracle_sees_on_the_device(module, name, bug, monkeypatch, fresh_programs):
    monkeypatch.setattr(module, name, bug)
    assert_the_oracle_sees_it()
