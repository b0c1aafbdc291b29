"""What the step hands to its proposer: each token's successor, and where every row now stands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.cache import Snapshot
from jaxspec.models.base import ForwardOutput, Model
from jaxspec.plan.plan import Program, StepOutput, output_layout, pack_plan
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.proposers import Drafts, Proposer
from jaxspec.requests.request import Finish
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.runner.batch_state import EngineState
from jaxspec.runner.propose import DROPPED
from jaxspec.runner.step import StepConfig, make_step
from jaxspec.sampling import ExactVerifier

VOCAB = 400
WIDTH = 3  # of a decode row


class SuccessorModel(Model):
    """After each token comes a table's successor: what a verify accepts is in our hand."""

    def __init__(self, successors):
        table = np.zeros(VOCAB, np.float32)
        for token, successor in successors.items():
            table[token] = successor
        self.table = nnx.Param(jnp.asarray(table))

    vocab_size = VOCAB
    max_position_embeddings = 64

    def cache_specs(self, options):
        return ()

    @staticmethod
    def parse_config(fields):
        raise NotImplementedError

    @staticmethod
    def canonical_name(name):
        raise NotImplementedError

    def forward(self, inputs, cache, taps=()):
        return ForwardOutput(self.table[...][inputs.tokens][:, None], None), cache

    def logits(self, hidden, columns=None):
        raise NotImplementedError("a greedy step makes none")

    def greedy_tokens(self, hidden, forbidden, columns=None):
        return hidden[:, 0].astype(jnp.int32)  # -1 stands for a model that fails


class Listener(Proposer):
    """Keeps what it was told, and drafts the same for all."""

    num_drafts = WIDTH - 1
    heard = None

    def hear(self, inputs):
        self.heard = inputs

    def propose(self, model, inputs, pools, tables):
        jax.debug.callback(self.hear, inputs)
        rows = inputs.slots.shape[0]
        tokens = jnp.tile(jnp.array([[7, 8]], jnp.int32), (rows, 1))
        return Drafts(tokens, jnp.where(inputs.should_draft, 2, 0), None), pools


NUM_ROWS = 4
BUCKETS = StepShapes(
    max_num_seqs=NUM_ROWS,
    max_model_len=64,
    page_size=4,
    num_pages=65,
    num_drafts=WIDTH - 1,
    decode_rows=(NUM_ROWS,),
    prefill_tokens=(12,),
    max_prefill_seqs=3,
)


def config_of(proposer, **options):
    graph, weights = nnx.split(SuccessorModel({}))
    tree = jax.tree.structure(weights)
    return StepConfig(BUCKETS, graph, tree, proposer, ExactVerifier(), (), Snapshot(), **options)


@functools.cache
def compiled_step(program):
    """The step, and the proposer that listens to it."""
    proposer = Listener()
    return jax.jit(make_step(config_of(proposer), program)), proposer


def run_step(make_rows, rows, successors, *, num_decode=0, chunks=(), after_chunks=()):
    """One step on these rows: what the proposer heard, the rows after it, the output."""
    program = Program(NUM_ROWS, 12 if chunks else 0, GREEDY, num_drafts=WIDTH - 1)
    model = SuccessorModel(successors)
    values = {
        "prev_positions": np.arange(NUM_ROWS),
        "num_decode": num_decode,
        "prefill_tokens": [token for chunk in chunks for token in chunk],
        "prefill_lens": [len(chunk) for chunk in chunks],
        "next_prefill_tokens": list(after_chunks) or [-1] * len(chunks),
    }
    state = EngineState(
        rows=make_rows(WIDTH - 1, [*rows, *[None] * (NUM_ROWS - len(rows))]),
        page_tables=np.arange(5 * 16, dtype=np.int32).reshape(5, 16),
        pools={},
        draft_logits=None,
    )
    weights = jax.tree.leaves(nnx.state(model))
    step, proposer = compiled_step(program)
    state, output = step(weights, (), state, pack_plan(program, BUCKETS, values))
    jax.effects_barrier()
    fields = state.rows.layout.unpack(np.asarray(state.rows.fields))
    (packed,) = np.asarray(output.packed)
    output = StepOutput.unpack(packed, output_layout(WIDTH - 1))
    return jax.tree.map(np.asarray, proposer.heard), fields, output


def prompt_row(slot, prefill_len, num_computed=0, **fields):
    return {"slot": slot, "prefill_len": prefill_len, "num_computed": num_computed, "max_len": 60,
            "last_token": 99} | fields  # fmt: skip


def verify_row(slot, num_computed, last_token, drafts, **fields):
    return prompt_row(slot, 2, num_computed, last_token=last_token, drafts=drafts,
                      num_drafts=len(drafts)) | fields  # fmt: skip


NEXT = {12: 100, 21: 200, 33: 300}
CHUNKS = [[10, 11, 12], [20, 21], [30, 31, 32, 33]]


def test_the_first_pass_reads_tokens_shifted_by_one_inside_each_prompt(make_rows):
    """The table: [10 11 12 | 20 21 | 30 31 32 33], next 100, 200, 300."""
    rows = [prompt_row(1, 3), prompt_row(2, 2), prompt_row(3, 4)]
    heard, fields, output = run_step(make_rows, rows, NEXT, chunks=CHUNKS)
    rectangle = 4 * WIDTH
    shifted = heard.next_tokens[rectangle : rectangle + 9]
    assert shifted.tolist() == [11, 12, 100, 21, 200, 31, 32, 33, 300]
    assert (heard.last_index[4:] - rectangle).tolist() == [2, 4, 8]
    assert heard.last_token[4:].tolist() == [100, 200, 300]
    assert heard.num_computed[4:].tolist() == [3, 2, 4]
    assert heard.should_draft.tolist() == [False] * 4 + [True] * 3
    assert output.tokens[4:, 0].tolist() == [100, 200, 300]
    assert fields["drafts"][:3].tolist() == [[7, 8]] * 3
    assert fields["num_drafts"].tolist() == [2, 2, 2, 0]


def test_at_an_unfinished_chunks_end_the_next_prompt_token_follows(make_rows):
    """The backup token: never what the model guessed there, nor the prompt's last token."""
    rows = [prompt_row(1, 9), prompt_row(2, 2), prompt_row(3, 40, num_computed=5)]
    heard, fields, output = run_step(
        make_rows, rows, NEXT, chunks=CHUNKS, after_chunks=[13, -1, 34]
    )
    shifted = heard.next_tokens[4 * WIDTH : 4 * WIDTH + 9]
    assert shifted.tolist() == [11, 12, 13, 21, 200, 31, 32, 33, 34]
    assert heard.should_draft.tolist() == [False] * 5 + [True, False]
    assert heard.num_computed[4:].tolist() == [3, 2, 9]
    assert fields["num_drafts"].tolist() == [0, 2, 0, 0], "a chunk is not followed by drafts"
    assert fields["last_token"].tolist() == [99, 200, 99, 0]
    assert output.tokens[4:].tolist() == [[-1] * 3, [200, -1, -1], [-1] * 3]


@pytest.mark.parametrize("after", [0, 13])
def test_prompts_that_are_not_there_change_no_token(make_rows, after):
    """One chunk where three may be: the padding ends at the same token, and writes nothing."""
    rows = [prompt_row(1, 9)]
    heard, _, _ = run_step(make_rows, rows, NEXT, chunks=[[10, 11, 12]], after_chunks=[after])
    assert heard.next_tokens[4 * WIDTH :][:3].tolist() == [11, 12, after]


def test_the_last_valid_token_lies_before_the_rejected_ones(make_rows):
    """The table: three rows of 1 + 2 tokens with 2, 3 and 1 valid sample at 1, 5 and 6."""
    successors = {10: 11, 11: 50, 20: 21, 21: 22, 22: 60, 30: 70}
    rows = [
        verify_row(1, 9, 10, [11, 12]),
        verify_row(2, 20, 20, [21, 22]),
        verify_row(3, 5, 30, [31, 32]),
    ]
    heard, fields, output = run_step(make_rows, rows, successors, num_decode=3)
    assert heard.last_index[:3].tolist() == [1, 5, 6]
    assert heard.last_token[:3].tolist() == [50, 60, 70]
    assert heard.num_computed[:3].tolist() == [11, 23, 6]
    # At every valid token the successor is what was emitted there.
    assert heard.next_tokens[:2].tolist() == [11, 50]
    assert heard.next_tokens[3:6].tolist() == [21, 22, 60]
    assert heard.next_tokens[6] == 70
    assert output.tokens.tolist()[:3] == [[11, 50, -1], [21, 22, 60], [70, -1, -1]]
    assert output.num_drafts.tolist() == [2, 2, 2, 0]
    assert output.num_accepted.tolist() == [1, 2, 0, 0]
    assert fields["state_offset"].tolist() == [1, 2, 0, 0]
    assert heard.should_draft.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("drafts", "num_drafts", "tokens", "num_accepted"),
    [
        ([11, 12], 2, [11, 12, 13], 2),
        ([11, 12], 1, [11, 12, -1], 1),
        ([11, 12], 0, [11, -1, -1], 0),
        ([-1, 12], 2, [11, -1, -1], 0),
        ([11, -1], 2, [11, 12, -1], 1),
        ([9, 12], 2, [11, -1, -1], 0),
    ],
)
def test_placeholders_and_drafts_that_were_not_proposed_never_stand(
    make_rows, drafts, num_drafts, tokens, num_accepted
):
    successors = {10: 11, 11: 12, 12: 13}
    row = verify_row(1, 9, 10, drafts, num_drafts=num_drafts)
    _, fields, output = run_step(make_rows, [row], successors, num_decode=1)
    assert output.tokens[0].tolist() == tokens
    assert (output.num_drafts[0], output.num_accepted[0]) == (num_drafts, num_accepted)
    assert fields["num_computed"][0] == 9 + num_accepted + 1


def test_the_tail_of_a_prompt_decodes_its_own_token(make_rows):
    """Prompt 11, computed 10: the row's last token is the prompt's, and it has no drafts."""
    row = prompt_row(1, 11, num_computed=10, last_token=12, drafts=[-1, -1])
    heard, fields, output = run_step(make_rows, [row], NEXT, num_decode=1)
    assert output.tokens[0].tolist() == [100, -1, -1]
    assert heard.next_tokens[0] == 100 and heard.last_index[0] == 0
    assert (fields["num_computed"][0], fields["last_token"][0]) == (11, 100)


def test_rows_that_end_get_no_drafts(make_rows):
    rows = [
        verify_row(1, 9, 10, [11, 12], stop_ids=[11]),
        verify_row(2, 9, 10, [11, 12], max_len=11),
        verify_row(3, 9, 10, [11, 12]),
        verify_row(4, 9, 10, [11, 12], finish=Finish.STOP),
    ]
    heard, fields, output = run_step(make_rows, rows, {10: 11, 11: 12, 12: 13}, num_decode=4)
    assert heard.should_draft.tolist() == [False, False, True, False]
    assert fields["num_drafts"].tolist() == [0, 0, 2, 0]
    ends = [Finish.STOP, Finish.LENGTH, Finish.RUNNING, Finish.STOP]
    assert output.finish.tolist() == ends == fields["finish"].tolist()
    emitted = [[11, -1, -1], [11, -1, -1], [11, 12, 13], [-1, -1, -1]]
    assert output.tokens.tolist() == emitted


def test_a_model_that_fails_ends_its_row_and_no_other(make_rows):
    successors = {10: 11, 11: -1, 20: 21, 21: 22, 22: 23}
    rows = [verify_row(1, 9, 10, [11, 12]), verify_row(2, 9, 20, [21, 22])]
    heard, _, output = run_step(make_rows, rows, successors, num_decode=2)
    assert output.tokens[:2].tolist() == [[11, -1, -1], [21, 22, 23]]
    assert output.finish[:2].tolist() == [Finish.ERROR, Finish.RUNNING]
    assert heard.should_draft[:2].tolist() == [False, True]


def test_idle_rows_keep_their_drafts_and_state(make_rows):
    """A row that is not scheduled for a step comes back as it left, whatever ran meanwhile."""
    idle = verify_row(3, 9, 10, [11, 12], state_offset=2)
    _, fields, _ = run_step(
        make_rows, [verify_row(1, 5, 20, [21, 22]), idle], {20: 21}, num_decode=1
    )
    for name, value in idle.items():
        if name not in ("drafts", "temperature"):
            assert fields[name][1] == value, name
    assert fields["drafts"][1].tolist() == [11, 12]


def test_dropped_drafts_are_counted_where_they_are_verified(make_rows):
    """They fall as placeholders do; a placeholder, or one that is not verified, is not counted."""
    rows = [
        verify_row(1, 4, 10, [DROPPED, DROPPED]),
        verify_row(2, 4, 20, [21, DROPPED]),
        verify_row(3, 4, 30, [-1, 31]),
        verify_row(4, 4, 30, [DROPPED, DROPPED], num_drafts=1),
    ]
    _, _, output = run_step(make_rows, rows, {20: 21, 21: 22}, num_decode=4)
    assert output.num_dropped.tolist() == [2, 1, 0, 1]
    assert output.num_accepted.tolist() == [0, 1, 0, 0]
    assert output.tokens[1].tolist() == [21, 22, -1]


@pytest.mark.parametrize("is_on", [False, True])
def test_loops_of_a_deterministic_engine_run_inside_of_cuda_graphs(is_on):
    options = config_of(None, is_deterministic=is_on).jit_options
    commands = options["compiler_options"].get("xla_gpu_enable_command_buffer", "")
    assert ("WHILE" in commands.split(",")) == is_on
    assert options["donate_argnums"] == 2
