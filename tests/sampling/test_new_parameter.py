"""A sampling parameter is its definition, its line in the table of row fields and its processor."""

import dataclasses

import jax.numpy as jnp
import pytest
from harness import FIXTURES

from jaxspec import LLM, SamplingParams
from jaxspec.flight.file import read
from jaxspec.plan import plan, row
from jaxspec.plan.plan import Program
from jaxspec.plan.row import RowField, row_layout
from jaxspec.requests.sampling_features import EVERYTHING, GREEDY, TOP_K, SamplingFeatures, rung
from jaxspec.runner import verify
from jaxspec.sampling.processors import PROCESSORS

BAN = "ban"


@dataclasses.dataclass
class Params(SamplingParams):
    """One more parameter: an id that never comes."""

    banned_id: int = -1

    @property
    def features(self):
        own = SamplingFeatures.of(BAN) if self.banned_id >= 0 else SamplingFeatures.of()
        return super().features | own


FIELD = RowField("banned_id", "Never comes; -1: none.", lambda r: r.params.banned_id)


def ban(logits, inputs, positions):
    ids = jnp.arange(logits.shape[1])[None, :]
    return jnp.where(ids == inputs.banned_id[:, None], -jnp.inf, logits)


@pytest.fixture
def llm(monkeypatch):
    """An LLM that has the parameter."""
    fields = (*row.SAMPLING_FIELDS, FIELD)
    monkeypatch.setattr(row, "FIELDS", (*row.FIELDS, FIELD))
    monkeypatch.setattr(row, "SAMPLING_FIELDS", fields)
    monkeypatch.setattr(verify, "SAMPLING_FIELDS", fields)  # the same name, imported
    monkeypatch.setitem(PROCESSORS, BAN, ban)
    for layout in (row_layout, plan._step_layout, plan._row_layout):
        layout.cache_clear()
    # A length of its own: no other test's programs are taken, and none takes these.
    options = {"max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [16]}
    yield LLM(FIXTURES / "qwen3", dtype="float32", max_model_len=72, **options)
    for layout in (row_layout, plan._step_layout, plan._row_layout):
        layout.cache_clear()


@pytest.mark.soak
def test_a_new_parameter_needs_no_line_of_the_engine(llm, tmp_path):
    """Two calls meet whose needs are not ordered: greedy with a ban, and a draw without one."""
    prompt = {"prompt_token_ids": [5, 6, 7]}
    greedy = Params(temperature=0.0, max_tokens=40, ignore_eos=True)
    drawn = Params(temperature=0.8, max_tokens=8, seed=3, ignore_eos=True)

    def tokens(params):
        return llm.generate([prompt], params)[0].outputs[0].token_ids

    banned = dataclasses.replace(greedy, banned_id=tokens(greedy)[4])
    stream = llm.stream(prompt, banned)
    first = next(stream).token_ids
    beside = tokens(drawn)
    streamed = [*first, *(token for delta in stream for token in delta.token_ids)]

    feature_sets = {
        program.features for program in llm._runner._programs if isinstance(program, Program)
    }
    own = rung(SamplingFeatures.of(BAN))
    assert feature_sets == {GREEDY, TOP_K, EVERYTHING, own, own.of_decoding}
    assert banned.banned_id not in streamed and len(streamed) == 40
    assert streamed[:4] == tokens(greedy)[:4] and streamed == tokens(banned)
    assert beside == tokens(drawn) != streamed[:8]
    recorded = {step.program for step in read(llm.save_flight(tmp_path / "a.npz")).steps}
    assert recorded <= llm._runner._programs.keys()
