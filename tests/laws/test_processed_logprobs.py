"""Logprobs of the distribution that tokens are drawn from, by its definition in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import GREEDY, REPLAY, SAMPLED, Harness, prompts
from logprobs import NEAR, check_logprobs, exact
from oracle import _keep
from prefixes import by_min_p, by_prefix

from jaxspec.requests.logprobs import readable
from jaxspec.requests.sampling_features import SAMPLED as TEMPERATURE_ALONE
from jaxspec.requests.sampling_features import join
from jaxspec.requests.sampling_params import PROCESSED, RAW
from jaxspec.runner import logprobs as logprobs_module
from jaxspec.runner import verify as verify_module
from jaxspec.sampling.logprobs import reported_logits

REPORTED = {"logprobs": 4, "prompt_logprobs": 2, "max_tokens": 12, "logprobs_mode": PROCESSED}
WARM = dataclasses.replace(SAMPLED, **REPORTED, temperature=1.4)
FEW = dataclasses.replace(WARM, temperature=0.7, top_k=12, top_p=0.9)
MASS = dataclasses.replace(WARM, top_p=0.8, min_p=0.01)
PENALISED = dataclasses.replace(FEW, presence_penalty=1.0, logit_bias={7: 2.0, 9: -100.0})
GREEDY_PENALISED = dataclasses.replace(GREEDY, **REPORTED, frequency_penalty=0.5)
AS_MODEL = dataclasses.replace(FEW, logprobs_mode=RAW)
KINDS = [WARM, FEW, MASS, PENALISED, GREEDY_PENALISED]
FEATURES = (join(each.features for each in [*KINDS, AS_MODEL]),)
LONG = prompts(6, seed=9, longest=30)


def run(params, **options):
    engine = Harness(feature_sets=FEATURES, **options)
    for number, prompt in enumerate(LONG):
        engine.add(prompt, params[number % len(params)], seed=number)
        engine.step()
    return engine.run()


def log_softmax(scores):
    most = scores.max()
    return scores - most - np.log(np.exp(scores - most).sum())


def cut(scores, params):
    if params.temperature:
        scores = by_min_p(scores / params.temperature, params.min_p)
        scores = _keep(scores, params.top_k, params.top_p)
    return log_softmax(scores)


def check(engine):
    """Each reported place has these logprobs, and -inf for what is never drawn."""
    for request in engine.requests:
        params, prompt, output = request.params, request.prompt, request.output
        if params.logprobs_mode == RAW:
            continue
        places = exact(engine.fixture, tuple(request.tokens))
        wanted = [cut(row, params) for row in places[1 : len(prompt)]]
        for index, row in enumerate(places[len(prompt) :]):
            wanted.append(cut(by_prefix(row, params, prompt, output[:index]), params))
        shown = readable(request.prompt_logprobs[1:], prompt[1:], params.prompt_logprobs, None)
        shown += readable(request.logprobs, output, params.logprobs, None)
        for index, (entry, want) in enumerate(zip(shown, wanted, strict=True), 1):
            what = f"{params.temperature}, {params.top_k}, {params.top_p}: token {index}"
            for token, found in entry.items():
                np.testing.assert_allclose(found.logprob, want[token], atol=NEAR, err_msg=what)
    assert check_raw(engine) == sum(r.params.logprobs_mode == RAW for r in engine.requests)


def check_raw(engine):
    """The others' are the model's own."""
    others = [r for r in engine.requests if r.params.logprobs_mode == RAW]
    check_logprobs(_Some(engine.fixture, others))
    return len(others)


@dataclasses.dataclass
class _Some:
    fixture: str
    requests: list


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        {"drafts": 3, "states": REPLAY, "chunk": 7, "max_in_flight": 2},
        {"drafts": 3, "probabilistic": True, "chunk": 7},
    ],
    ids=["greedy drafts, replayed", "sampled drafts"],
)
def test_each_token_has_the_logprob_with_which_it_was_drawn(options):
    """In a batch of all kinds; of drafts it is the target's, and no residual's."""
    engine = run([*KINDS, AS_MODEL], **options)
    check(engine)
    assert sum(r.metrics.num_accepted_tokens for r in engine.requests) > 0


@pytest.mark.soak
def test_all_that_may_be_drawn_has_a_mass_of_one():
    engine = run([dataclasses.replace(FEW, logprobs=20, top_p=1.0)], drafts=3)
    for request in engine.requests:
        for entry in readable(request.logprobs, request.output, 20, None):
            masses = np.exp([found.logprob for found in entry.values()])
            assert (masses > 0).sum() == FEW.top_k and abs(masses.sum() - 1) < 1e-5


@pytest.mark.soak
def test_without_processors_they_are_the_raw_ones_bit_for_bit():
    plain = dataclasses.replace(WARM, temperature=1.0)
    one, other = (
        run([dataclasses.replace(plain, logprobs_mode=mode)], drafts=3) for mode in (RAW, PROCESSED)
    )
    for raw, processed in zip(one.requests, other.requests, strict=True):
        np.testing.assert_array_equal(raw.logprobs, processed.logprobs)
        np.testing.assert_array_equal(raw.prompt_logprobs[1:], processed.prompt_logprobs[1:])


@pytest.mark.soak
@pytest.mark.parametrize("module", [verify_module, logprobs_module], ids=["output", "prompt"])
def test_nothing_is_processed_for_requests_of_raw_ones(module, monkeypatch, fresh_programs):
    processed = []

    def counted(logits, *rows, features):
        jax.debug.callback(lambda: processed.append(1))
        return reported_logits(logits, *rows, features=features)

    monkeypatch.setattr(module, "reported_logits", counted)
    engine = Harness(feature_sets=FEATURES)
    engine.add(LONG[0], AS_MODEL, seed=0)
    assert check_raw(engine.run()) and not processed
    engine.add(LONG[1], FEW, seed=1)
    check(engine.run())
    assert processed


# Planted bugs.


def of_the_model(logits, inputs, positions, *, features):
    """Before the temperature, as a trainer that divides logprobs by it would want them."""
    return logits


def of_the_drafter(logits, inputs, positions, *, features):
    """Of the distribution that drafts are drawn from, which has no top-k and no penalties."""
    return reported_logits(logits, inputs, positions, features=TEMPERATURE_ALONE)


def of_the_next_row(logits, inputs, positions, *, features):
    columns = {name: jnp.roll(column, 1, axis=0) for name, column in inputs.columns.items()}
    inputs = dataclasses.replace(inputs, columns=columns)
    return reported_logits(logits, inputs, positions, features=features)


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize("module", [verify_module, logprobs_module], ids=["output", "prompt"])
@pytest.mark.parametrize("bug", [of_the_model, of_the_drafter, of_the_next_row])
def test_the_definition_sees(bug, module, monkeypatch, fresh_programs):
    monkeypatch.setattr(module, "reported_logits", bug)
    engine = run([*KINDS, AS_MODEL], drafts=3, states=REPLAY)
    with pytest.raises(AssertionError):
        check(engine)
