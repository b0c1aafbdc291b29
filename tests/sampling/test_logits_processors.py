"""Processors of users on rows of logits: each has the prefix of its position, and its arguments."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxspec.plan.processor_plan import pack_processor_args
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.plan.table_plan import pack_tables
from jaxspec.requests.logits_processors import LogitsProcessor, ProcessorArgs
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.sampling.bias_tables import BiasTables
from jaxspec.sampling.logits_processors import apply_processors
from jaxspec.sampling.params import SamplingInputs
from jaxspec.sampling.processor_tables import ProcessorTables
from jaxspec.sampling.tables import SamplingTables

VOCAB, WIDTH, WINDOW = 40, 3, 4
SHAPES = StepShapes(
    max_num_seqs=5,
    max_model_len=64,
    page_size=4,
    num_pages=9,
    num_drafts=WIDTH - 1,
    decode_rows=(5,),
    prefill_tokens=(16,),
    processor_params=4,
    processor_tokens=5,
)
RANDOM = np.random.default_rng(0)


@dataclasses.dataclass(frozen=True)
class Show(LogitsProcessor):
    """Writes all of its inputs to the logits."""

    params = "a", "b"
    window = WINDOW

    def __call__(self, logits, prefix, params):
        counts = jnp.stack([prefix.length, prefix.prompt_length]).astype(jnp.float32)
        shown = jnp.concatenate([prefix.ids.astype(jnp.float32), counts])
        shown = jnp.concatenate([shown, jnp.stack([params["a"], params["b"]])])
        return logits.at[: len(shown)].set(shown)


class Sum(LogitsProcessor):
    params = "c", "d"

    def __call__(self, logits, prefix, params):
        return logits + params["c"] * logits[0] + params["d"]


BOTH = Show(), Sum()


def inputs_of(rows, processors=BOTH):
    """Sampling inputs of rows (prompt, output, args), whose last tokens are those of the step."""
    tables = ProcessorTables.empty(SHAPES, processors)
    bias = BiasTables.empty(SHAPES.num_slots, VOCAB, WIDTH, SHAPES.processor_tokens)
    tokens, computed, slots = np.zeros((len(rows), WIDTH), np.int32), [], []
    for row, (prompt, output, args) in enumerate(rows):
        whole = [*prompt, *output]
        start = len(whole) - WIDTH
        request = Request(tuple(prompt), SamplingParams(), 0, processor_args=args)
        request.tokens += output
        request.slot, request.num_computed = row + 1, max(0, start - 2)
        tables = tables.with_slot(jnp.asarray(pack_processor_args(request, SHAPES)), SHAPES)
        index = np.arange(request.num_computed, start, dtype=np.int32)
        bias = bias.with_slot(jnp.asarray(pack_tables(request, VOCAB, SHAPES.processor_tokens)))
        own = np.full(len(index), row + 1, np.int32)
        bias = bias.with_tokens(own, np.array(whole, np.int32)[index], index)
        tokens[row] = whole[start:]
        computed.append(start)
        slots.append(row + 1 if args else 0)
    columns = {
        "num_computed": np.array(computed, np.int32),
        "prompt_len": np.array([len(prompt) for prompt, *_ in rows], np.int32),
        "table_slot": np.array(slots, np.int32),
    }
    columns = {name: jnp.asarray(column) for name, column in columns.items()}
    given = SamplingInputs(
        columns, SamplingTables(bias=bias, processors=tables), jnp.asarray(tokens)
    )
    positions = np.array(computed)[:, None] + 1 + np.arange(WIDTH)
    return given.repeat(WIDTH), jnp.asarray(positions.reshape(-1), jnp.int32)


def test_each_position_has_its_prefix_and_its_rows_arguments():
    rows = [
        (list(range(3, 12)), [20, 21], ProcessorArgs(1, (0.5, -1.0, 0.0, 0.0))),
        ([5, 6, 7], [], ProcessorArgs(1, (2.0, 3.0, 0.0, 0.0))),
        (list(range(9)), [1, 2, 3], None),
        ([8], [9, 10, 11], ProcessorArgs(3, (4.0, 5.0, 2.0, 0.25))),
    ]
    logits = RANDOM.normal(size=(len(rows) * WIDTH, VOCAB)).astype(np.float32)
    found = np.array(apply_processors(jnp.asarray(logits), *inputs_of(rows)))
    expected = logits.copy()
    for row, (prompt, output, args) in enumerate(rows):
        for place in range(WIDTH if args else 0):
            before = ([*prompt, *output])[: len(prompt) + len(output) - WIDTH + 1 + place]
            ids = [-1] * WINDOW + before
            shown = [*ids[len(ids) - WINDOW :], len(before), len(prompt), *args.values[:2]]
            own = expected[row * WIDTH + place]
            own[: len(shown)] = shown
            if args.used & 2:
                own += np.float32(args.values[2]) * own[0] + np.float32(args.values[3])
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_array_equal(found[2 * WIDTH : 3 * WIDTH], logits[2 * WIDTH : 3 * WIDTH])


def test_masked_ids_and_nans_stay():
    logits = np.zeros((WIDTH, VOCAB), np.float32)
    logits[:, 20:] = -np.inf
    logits[1, 25] = np.nan
    rows = [([1, 2, 3, 4], [], ProcessorArgs(2, (0.0, 0.0, 0.0, 7.0)))]
    found = np.array(apply_processors(jnp.asarray(logits), *inputs_of(rows)))
    np.testing.assert_array_equal(found, np.where(logits == 0, 7.0, logits))


def test_rows_without_arguments_pass_processors_that_make_nans():
    class Bad(Sum):
        def __call__(self, logits, prefix, params):
            return logits / params["d"] * jnp.inf

    rows = [([1, 2, 3], [4], None), ([1, 2, 3], [4], ProcessorArgs(2, (0.0, 0.0, 0.0, 1.0)))]
    logits = jnp.asarray(RANDOM.normal(size=(2 * WIDTH, VOCAB)), jnp.float32)
    found = apply_processors(logits, *inputs_of(rows, (Show(), Bad())))
    np.testing.assert_array_equal(found[:WIDTH], logits[:WIDTH])
    assert not np.isfinite(found[WIDTH:]).any()


def test_without_tables_the_logits_are_the_same_array():
    logits = jnp.zeros((WIDTH, VOCAB))
    given, positions = inputs_of([([1, 2, 3], [4], None)])
    for tables in (None, SamplingTables()):
        assert apply_processors(logits, given.replace(tables=tables), positions) is logits
    assert ProcessorTables.empty(SHAPES, ()) is None
