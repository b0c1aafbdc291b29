"""Which decision each verifier leaves to which function, and on what."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.options import SpeculativeConfig
from jaxspec.requests.sampling_features import FULL, GREEDY, SAMPLED
from jaxspec.sampling import (
    NO_TOKEN,
    BlockVerifier,
    ExactVerifier,
    RejectionVerifier,
    SyntheticVerifier,
    make_verifier,
    verify_block,
    verify_exact,
    verify_rejection,
)

ROWS, DRAFTS, VOCAB = 16, 3, 100
ALWAYS = SyntheticVerifier((1.0,) * DRAFTS)
VERIFIERS = [ExactVerifier(), RejectionVerifier(), BlockVerifier(), ALWAYS]


def name(verifier):
    return type(verifier).__name__


@pytest.fixture
def places(make_inputs):
    """Target tokens, logits, drafts, draft logits, inputs and positions; drafts half right."""

    def build(num_drafts=DRAFTS, temperature=0.0):
        random = np.random.default_rng(num_drafts)
        shape = ROWS, num_drafts + 1
        logits = jnp.asarray(random.normal(size=(*shape, VOCAB)), jnp.float32)
        target = jnp.asarray(logits.argmax(axis=2), jnp.int32)
        wrong = random.integers(2, size=(ROWS, num_drafts))
        drafts = (target[:, :-1] + jnp.asarray(wrong, jnp.int32)) % VOCAB
        positions = jnp.broadcast_to(jnp.arange(5, 6 + num_drafts, dtype=jnp.int32), shape)
        inputs = make_inputs(ROWS, temperature)
        return target, logits, drafts, logits[:, :-1], inputs, positions

    return build


def assert_same(result, expected):
    np.testing.assert_array_equal(result.tokens, expected.tokens)
    np.testing.assert_array_equal(result.num_accepted, expected.num_accepted)


@pytest.mark.parametrize("verifier", VERIFIERS, ids=name)
def test_a_greedy_program_is_verified_without_logits(verifier, places):
    target, _, drafts, draft_logits, inputs, positions = places()
    result = verifier(target, None, drafts, draft_logits, inputs, positions, features=GREEDY)
    if verifier is ALWAYS:
        emitted = np.concatenate([drafts, target[:, -1:]], axis=1)
        np.testing.assert_array_equal(result.tokens, emitted)
        return
    assert len(np.unique(result.num_accepted)) > 2
    assert_same(result, verify_exact(target, drafts))


@pytest.mark.few(3)
@pytest.mark.parametrize("features", [GREEDY, SAMPLED, FULL], ids=str)
@pytest.mark.parametrize("verifier", VERIFIERS[:3], ids=name)
def test_greedy_rows_are_verified_exactly_whatever_the_sampler(verifier, features, places):
    target, logits, drafts, draft_logits, inputs, positions = places()
    logits = logits if features.makes_logits else None
    result = verifier(target, logits, drafts, draft_logits, inputs, positions, features=features)
    assert_same(result, verify_exact(target, drafts))


@pytest.mark.parametrize("features", [GREEDY, SAMPLED, FULL], ids=str)
@pytest.mark.parametrize("verifier", [ExactVerifier(), SyntheticVerifier(())], ids=name)
def test_without_drafts_every_verifier_takes_the_targets_own_token(verifier, features, places):
    target, logits, *others = places(num_drafts=0, temperature=0.9)
    target = target.at[3].set(NO_TOKEN)
    logits = logits if features.makes_logits else None
    result = verifier(target, logits, *others, features=features)
    np.testing.assert_array_equal(result.tokens, target)
    np.testing.assert_array_equal(result.num_accepted, 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("features", [SAMPLED, FULL], ids=str)
@pytest.mark.parametrize(
    ("verifier", "verify"),
    [(RejectionVerifier(), verify_rejection), (BlockVerifier(), verify_block)],
    ids=["standard", "block"],
)
def test_drawn_drafts_are_decided_on_by_the_logits_alone(verifier, verify, features, places):
    target, logits, *others = places(temperature=0.9)
    result = verifier(target * 0 + 7, logits, *others, features=features)
    assert_same(result, verify(logits, *others, features=features))


def test_the_configuration_says_which_one():
    assert make_verifier(None) == make_verifier(SpeculativeConfig()) == ExactVerifier()
    drawn = SpeculativeConfig(draft_sample_method="probabilistic")
    assert make_verifier(drawn) == RejectionVerifier()
    block = dataclasses.replace(drawn, rejection_sample_method="block")
    assert make_verifier(block) == BlockVerifier()
    lossy = SpeculativeConfig(synthetic_acceptance_rates=(1.0,) * DRAFTS)
    assert make_verifier(lossy) == ALWAYS
