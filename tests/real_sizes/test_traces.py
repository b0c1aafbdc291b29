"""Sampling traces at published widths of the vocabulary, with no row, one row and several rows.

Nothing is computed: `jax.eval_shape` runs the Python of each function, where a size that is zero or
no multiple of another raises. A step without prompts has no rows at chunk ends, and one of prompts
alone has none that decode.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxspec.sampling
from jaxspec.plan.row import SAMPLING_FIELDS
from jaxspec.requests.sampling_features import SamplingFeatures
from jaxspec.sampling import (
    BlockVerifier,
    ExactVerifier,
    RejectionVerifier,
    SamplingInputs,
    SyntheticVerifier,
    Use,
    draw,
    draw_draft,
    forbidden_ids,
    gumbel_noise,
    uniform_noise,
)
from jaxspec.sampling.candidates import largest
from jaxspec.sampling.logprobs import pack_logprobs, reported_logits
from jaxspec.sampling.processors import PROCESSORS
from jaxspec.sampling.search import Bound, bound_of_mass, bound_of_top_k, last_id, mass_within
from jaxspec.sampling.tables import SamplingTables

# Llama 2, SmolLM2, LFM2, Llama 3, Nemotron, Qwen3, Qwen3.5; GPT-2; one more than is sorted at once.
VOCABULARIES = 32_000, 49_152, 65_536, 128_256, 131_072, 151_936, 248_320, 50_257, 2_049
ROWS = 0, 1, 8
EMITS = 4  # tokens of a verify
EVERYTHING = SamplingFeatures.of(*PROCESSORS)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


ints = functools.partial(array, dtype=jnp.int32)


def sampling_inputs(rows, vocab, tokens=EMITS):
    """With all tables; `tokens` are those that the step computes before a row's."""
    columns = {
        field.name: jax.ShapeDtypeStruct((rows, *field.shape), field.dtype)
        for field in SAMPLING_FIELDS
    }
    columns |= {"slot": ints(rows), "num_computed": ints(rows), "grammar_states": ints(rows, EMITS)}
    tables = jax.eval_shape(lambda: SamplingTables.empty(3, vocab, 512, 4))
    return SamplingInputs(columns, tables, ints(rows, tokens))


def of_logits(function, tokens=EMITS, **options):
    """A function of logits, inputs and positions."""
    return lambda rows, vocab: jax.eval_shape(
        functools.partial(function, **options),
        array(rows, vocab),
        sampling_inputs(rows, vocab, tokens),
        ints(rows),
    )


def of_verifier(verifier):
    """A verifier, with every processor."""
    return lambda rows, vocab: jax.eval_shape(
        functools.partial(verifier, features=EVERYTHING),
        ints(rows, EMITS),
        array(rows, EMITS, vocab),
        ints(rows, EMITS - 1),
        array(rows, EMITS - 1, vocab),
        sampling_inputs(rows, vocab),
        ints(rows, EMITS),
    )


def of_arrays(function, *arguments):
    """`arguments` make one array, or a tree of arrays, from the rows and the vocabulary."""
    return lambda rows, vocab: jax.eval_shape(function, *(make(rows, vocab) for make in arguments))


def logits(rows, vocab):
    return array(rows, vocab)


def reals(rows, vocab):
    return array(rows)


def numbers(rows, vocab):
    return ints(rows)


def flags(rows, vocab):
    return array(rows, dtype=bool)


def bound(rows, vocab):
    return Bound(array(rows), ints(rows))


def noise(rows, vocab):
    draw_noise = functools.partial(gumbel_noise, use=Use.TARGET, ids=vocab)
    return jax.eval_shape(draw_noise, ints(rows), ints(rows))


FUNCTIONS = {
    **{name: of_logits(processor) for name, processor in PROCESSORS.items()},
    "draw": of_logits(draw, features=EVERYTHING),
    "draw at chunk ends": of_logits(draw, tokens=0, features=EVERYTHING),
    "draw_draft": of_logits(draw_draft, place=2),
    "ExactVerifier": of_verifier(ExactVerifier()),  # verify_exact
    "RejectionVerifier": of_verifier(RejectionVerifier()),  # verify_rejection
    "BlockVerifier": of_verifier(BlockVerifier()),  # verify_block
    "SyntheticVerifier": of_verifier(SyntheticVerifier((0.9, 0.5, 0.0))),
    "uniform_noise": of_arrays(functools.partial(uniform_noise, use=Use.ACCEPT), numbers, numbers),
    "gumbel_noise": noise,
    "forbidden_ids": of_arrays(forbidden_ids, sampling_inputs, numbers),
    "reported_logits": of_logits(reported_logits, features=EVERYTHING),
    "pack_logprobs": of_arrays(pack_logprobs, logits, numbers),
    "largest 1": of_arrays(lambda x: largest(x, 1), logits),
    "largest 20": of_arrays(lambda x: largest(x, 20), logits),
    "largest 128": of_arrays(lambda x: largest(x, 128), logits),
    "largest 2049": of_arrays(lambda x: largest(x, 2049), logits),
    "bound_of_top_k": of_arrays(bound_of_top_k, logits, numbers, flags),
    "bound_of_mass": of_arrays(bound_of_mass, logits, reals, reals, bound, flags),
    "mass_within": of_arrays(mass_within, logits, reals, bound, flags),
    "last_id": of_arrays(last_id, logits, bound, flags),
}


@pytest.mark.few(24)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_sampling_traces(name, vocab):
    for rows in ROWS:
        found = FUNCTIONS[name](rows, vocab)
        assert {leaf.shape[0] for leaf in jax.tree.leaves(found)} == {rows}


def test_every_function_of_sampling_is_traced():
    """By itself or by its verifier; the table takes the processors from their own table."""
    no_functions = {"NO_TOKEN", "Acceptance", "SamplingInputs", "Use", "Verifier", "make_verifier"}
    by_verifiers = {"verify_block", "verify_exact", "verify_rejection"}
    assert set(jaxspec.sampling.__all__) - no_functions - by_verifiers <= FUNCTIONS.keys()


@pytest.mark.parametrize("width", [0, 1])
def test_rows_repeat_for_any_number_of_positions(width):
    """A program without drafts verifies one token a row, and its rows may be none."""
    for rows in ROWS:
        found = jax.eval_shape(
            lambda inputs: inputs.repeat(width), sampling_inputs(rows, 100, tokens=1)
        )
        assert found.seed.shape == (rows * width,)
