"""The head drafts, inside the engine, what the reference implementation's head drafts."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import FIXTURES, Harness, model
from safetensors import safe_open

from jaxspec.models.layers.mtp_head import MTPHead
from jaxspec.models.qwen3_5 import Qwen3_5
from jaxspec.options import SpeculativeConfig
from jaxspec.options.draft_methods import MTPOptions
from jaxspec.pallas import dispatch
from jaxspec.proposers import DraftInputs, make_proposer, mtp
from jaxspec.requests.sampling_features import GREEDY, SAMPLED
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.sampling import SamplingInputs
from jaxspec.weight import Dense, Float8


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fixture", "chunk", "count"),
    [*itertools.product(("qwen3_5", "qwen3_5_tied"), (None, 33), (4,)), ("qwen3_next", 33, 3)],
)
def test_the_first_drafts_are_the_references(fixture, chunk, count):
    """Recursive drafts after the prompt, the token after each chunk taken from the plan."""
    with safe_open(FIXTURES / fixture / "reference.safetensors", "np") as file:
        prompt, drafts = (file.get_tensor(n).tolist() for n in ("prompt_ids", "mtp_draft_ids"))
    engine = Harness(fixture, drafts=count, chunk=chunk, max_in_flight=0)
    request = engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=20))[0]
    while not request.output:
        engine.step()
    rows = engine.runner.state.rows
    assert np.asarray(rows.drafts)[0].tolist() == drafts[:count]
    assert int(rows.num_drafts[0]) == count


SHUFFLED = tuple(np.random.default_rng(1).permutation(264)[:64].tolist())
ROWS = 5


@pytest.fixture
def propose(monkeypatch):
    """Drafts from a head whose hidden state is `next(hidden, tokens)`; its states, pass by pass."""
    qwen = model("qwen3_5")
    weight = np.asarray(qwen.trunk.lm_head.weight[...])
    first = np.random.default_rng(0).normal(size=(ROWS, len(weight))).astype(np.float32)

    def next_hidden(embedded, hidden):
        return hidden[:, ::-1] + embedded

    def run(draft_vocab, method="greedy", temperature=0.0, lost=None, features=SAMPLED):
        """`lost`: the row whose hidden state has a NaN."""
        seen, hidden = [], first.copy()
        if lost is not None:
            hidden[lost, 0] = np.nan

        def call(self, embedded, hidden, inputs, cache):
            if seen:  # the passes of one token a row
                np.testing.assert_array_equal(inputs.live, ints != 1)
            seen.append(next_hidden(np.asarray(embedded), np.asarray(hidden)))
            return jnp.asarray(seen[-1]), cache

        def select(self, embedded, hidden, inputs, cache, selection):
            """The first pass, of all tokens, for the token before each row's newest."""
            assert not seen
            decode = selection.inputs.decode
            np.testing.assert_array_equal(selection.index, ints)
            np.testing.assert_array_equal(decode.num_computed, ints + 2)
            np.testing.assert_array_equal(decode.query_len, ints != 1)
            np.testing.assert_array_equal(selection.inputs.live, ints != 1)
            return call(self, embedded, hidden, inputs, cache)

        monkeypatch.setattr(MTPHead, "__call__", call)
        monkeypatch.setattr(MTPHead, "select", select)
        monkeypatch.setattr(Qwen3_5, "embed", lambda self, tokens: jnp.asarray(weight)[:, tokens].T)
        config = SpeculativeConfig(
            num_speculative_tokens=3, draft_sample_method=method, options=MTPOptions(draft_vocab)
        )
        proposer = make_proposer(config, qwen)
        ints = jnp.arange(ROWS, dtype=jnp.int32)
        columns = {"seed": ints, "stop_ids": ints[:, None] * 0 - 1, "min_len": ints * 0}
        columns["temperature"] = jnp.full(ROWS, temperature, jnp.float32)
        inputs = DraftInputs(
            model=SimpleNamespace(page_tables=jnp.zeros((ROWS + 1, 4), jnp.int32)),
            hidden=jnp.asarray(hidden),
            aux_hidden=None,
            next_tokens=ints,
            last_index=ints,
            slots=ints + 1,
            num_computed=ints + 3,
            max_len=ints + 99,
            num_drafts=3,
            num_emitted=ints,
            state_offset=ints,
            ring_length=ints,
            last_token=ints,
            should_draft=ints != 1,
            proposer_key=ints,
            sampling=SamplingInputs(columns),
            paths=None,
            page_size=4,
            features=features,
        )
        drafts, _ = proposer.propose(qwen, inputs, None, proposer.init_tables(qwen))
        assert drafts.num_drafts.tolist() == [3, 0, 3, 3, 3]
        return drafts, np.stack(seen, axis=1) @ weight

    return run


@pytest.mark.few(2)
@pytest.mark.parametrize("vocab", [None, 64, SHUFFLED], ids=["all", "first", "listed"])
def test_greedy_drafts_are_the_best_of_the_full_head_among_the_vocabulary(propose, vocab):
    drafts, scores = propose(vocab)
    ids = np.sort(np.arange(264)[:vocab] if vocab != SHUFFLED else vocab)
    np.testing.assert_array_equal(drafts.tokens, ids[scores[:, :, ids].argmax(axis=2)])
    assert drafts.tokens.dtype == jnp.int32 and drafts.logits is None


@pytest.mark.few(2)
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("vocab", [None, 64, SHUFFLED], ids=["all", "first", "listed"])
def test_a_head_that_fails_drafts_placeholders_in_its_row_alone(propose, vocab, method):
    sound, _ = propose(vocab, method)
    drafts, _ = propose(vocab, method, lost=2)
    assert drafts.tokens[2].tolist() == [-1] * 3
    others = np.arange(ROWS) != 2
    np.testing.assert_array_equal(drafts.tokens[others], sound.tokens[others])


@pytest.mark.parametrize(
    "program", [{}, {"method": "probabilistic", "features": GREEDY}], ids=["drafts", "programs"]
)
def test_greedy_ones_need_no_logits(propose, monkeypatch, program):
    expected, _ = propose(SHUFFLED)
    monkeypatch.setattr(Qwen3_5, "logits", None)
    drafts, _ = propose(SHUFFLED, **program)
    np.testing.assert_array_equal(drafts.tokens, expected.tokens)
    assert drafts.logits is None


def test_probabilistic_drafts_come_of_the_vocabulary_and_give_what_they_were_drawn_from(propose):
    drafts, scores = propose(SHUFFLED, "probabilistic", temperature=2.0)
    listed = np.isin(np.arange(264), SHUFFLED)
    assert listed[drafts.tokens].all() and (drafts.tokens != scores.argmax(axis=2)).any()
    assert drafts.logits.dtype == jnp.float32
    np.testing.assert_allclose(drafts.logits, np.where(listed, scores, -np.inf), atol=1e-4)
    best, _ = propose(SHUFFLED, "probabilistic")
    np.testing.assert_array_equal(best.tokens, propose(SHUFFLED)[0].tokens)


def test_the_tables_hold_the_ids_and_their_part_of_the_head():
    qwen = model("qwen3_5")
    proposer = make_proposer(SpeculativeConfig(options=MTPOptions(SHUFFLED)), qwen)
    ids, head = proposer.init_tables(qwen)
    np.testing.assert_array_equal(ids, sorted(SHUFFLED))
    np.testing.assert_array_equal(head.array, qwen.trunk.lm_head.weight[...][:, ids])
    others = make_proposer(SpeculativeConfig(options=MTPOptions(64)), qwen)
    assert proposer == others and hash(proposer) == hash(others)  # one program for both
    whole = make_proposer(SpeculativeConfig(options=MTPOptions(264)), qwen)
    assert whole.init_tables(qwen) == ()


@pytest.mark.parametrize("vocab", [None, SHUFFLED], ids=["all", "listed"])
def test_a_head_in_8_bits_is_a_copy_that_scores_greedy_drafts(vocab):
    qwen = model("qwen3_5")
    config = SpeculativeConfig(options=MTPOptions(vocab, "float8_e4m3fn"))
    ids, head = make_proposer(config, qwen).init_tables(qwen)
    assert isinstance(head, Float8)
    of = np.arange(264) if vocab is None else np.asarray(ids)
    weight = np.asarray(qwen.trunk.lm_head.weight[...])[:, of]
    np.testing.assert_allclose(head.dense().array, weight, rtol=2**-4, atol=abs(weight).max() / 1e5)
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, len(weight))), jnp.float32)
    tokens = qwen.greedy_tokens(hidden, jnp.zeros((ROWS, 0), jnp.int32), head)
    np.testing.assert_array_equal(tokens, np.argmax(hidden @ head.dense().array, axis=1))


def test_8_bits_give_no_distribution():
    config = {"draft_head_dtype": "float8_e4m3fn", "draft_sample_method": "probabilistic"}
    with pytest.raises(ValueError, match="scores greedy drafts.* Drop one"):
        make_proposer(SpeculativeConfig.of(config), model("qwen3_5"))


def test_8_bits_are_chosen_where_they_are_faster(monkeypatch):
    """Where kernels run, for a large head of a model in 16 bits, and for greedy drafts."""
    gains = mtp.gains_from_float8
    large = Dense(jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16))
    assert not gains(large)  # on a CPU
    monkeypatch.setattr(dispatch, "kernels_here", lambda: (True, None))
    assert gains(large)
    for shape, dtype in (
        ((1024, 4096), "float32"),
        ((512, 4096), "bfloat16"),
        ((1024, 9), "bfloat16"),
    ):
        assert not gains(Dense(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))))
    monkeypatch.setattr(mtp, "gains_from_float8", lambda weight: True)
    qwen = model("qwen3_5")
    assert isinstance(make_proposer(SpeculativeConfig(), qwen).init_tables(qwen)[1], Float8)
    for other in ({"draft_head_dtype": None}, {"draft_sample_method": "probabilistic"}):
        assert make_proposer(SpeculativeConfig.of(other), qwen).init_tables(qwen) == ()


def test_a_model_without_the_head_is_refused():
    proposer = make_proposer(SpeculativeConfig(), model("qwen3"))
    with pytest.raises(ValueError, match="a checkpoint with `mtp.* another speculative method"):
        proposer.propose(model("qwen3"), None, None, ())
