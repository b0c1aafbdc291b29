"""Programs that tests share (`_shared_steps`): they are those that each engine would make.

Engines share a program if their shapes differ in what no step reads; then its trace is the same.
"""

import jax
import jax.numpy as jnp
import pytest
from harness import HYBRID, REPLAY, ROWS, abstract, model

from jaxspec.options import SpeculativeConfig
from jaxspec.options.draft_methods import MTPOptions
from jaxspec.plan.plan import ForwardPass, Program
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.proposers import make_proposer
from jaxspec.requests.sampling_features import EVERYTHING, GREEDY
from jaxspec.runner import model_runner
from jaxspec.runner.blueprint import Blueprint
from jaxspec.runner.step import new_step
from jaxspec.runner.warmup import label
from jaxspec.sampling import make_verifier

MTP = SpeculativeConfig("mtp", 2, options=MTPOptions())
PROGRAMS = [
    Program(ROWS, 0, GREEDY, num_drafts=2),
    Program(ROWS, 16, EVERYTHING, num_drafts=2),
    Program(ROWS, 0, EVERYTHING, num_steps=2, num_drafts=1),
    ForwardPass(ROWS, 2),
    ForwardPass(ROWS, 2).rest,
]


@pytest.fixture(scope="module")
def blueprint():
    target = model(HYBRID)
    shapes = StepShapes(
        max_num_seqs=ROWS,
        max_model_len=64,
        page_size=4,
        num_pages=80,
        num_drafts=2,
        decode_rows=(2, ROWS),
        prefill_tokens=(8, 16),
        max_prefill_seqs=3,
        num_checkpoints=5,
        steps_per_dispatch=2,
        draft_buckets=(1, 2),
        vocab_size=target.vocab_size,
    )
    return Blueprint.of(
        abstract(target),
        shapes,
        make_proposer(MTP, target, None),
        dtype=jnp.dtype("float32"),
        verifier=make_verifier(MTP),
        states=REPLAY,
    )


@pytest.mark.parametrize("program", PROGRAMS, ids=label)
def test_a_shared_program_has_the_trace_of_the_engine_s_own(program, blueprint, fresh_programs):
    arguments = blueprint._args(program)
    own, shared = (
        make(blueprint.config, program).trace(*arguments).jaxpr
        for make in (new_step, model_runner.jitted_step)
    )
    assert len(jax.tree.leaves(arguments)) > 20
    assert str(own) == str(shared)
