"""Warm-up: what is lowered here and compiled on another thread is what a step then runs."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import SNAPSHOT, model

from jaxspec.plan.plan import EXPORT, MOVES, RESTORE, Program, StepPlan
from jaxspec.plan.step_shapes import SchedulerLimits, StepShapes
from jaxspec.requests.sampling_features import GREEDY, SAMPLED
from jaxspec.runner import warmup
from jaxspec.runner.blueprint import Blueprint
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.warmup import programs, warm_up
from jaxspec.sampling import make_verifier

SIZES = StepShapes(
    max_num_seqs=3,
    max_model_len=24,
    page_size=4,
    num_pages=19,
    num_drafts=0,
    decode_rows=(1, 3),
    prefill_tokens=(16,),
    vocab_size=model("qwen3").vocab_size,
)
NAMES = ["1 row, greedy", "3 rows, greedy", "3 rows, 16 prompt tokens, greedy"]
FORK = "copies of a prompt's state"
TABLES = "tables of what a request forbids"
MASKS = "masks of a grammar"


def make_runner():
    blueprint = Blueprint.of(
        model("qwen3"),
        SIZES,
        None,
        dtype=jnp.dtype("float32"),
        verifier=make_verifier(None),
        states=SNAPSHOT,
    )
    return ModelRunner(model("qwen3"), blueprint)


@pytest.fixture
def runner():
    return make_runner()


@pytest.fixture
def compiled_by():
    """The thread of each compilation, as JAX tells of it."""
    heard = []

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            heard.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield heard
    jax.monitoring.unregister_event_duration_listener(listen)


def test_each_program_is_compiled_once_and_several_at_a_time(runner, compiled_by, monkeypatch):
    monkeypatch.setattr(warmup, "num_cores", lambda: 4)
    before = {id(leaf) for leaf in jax.tree.leaves(runner.state)}
    for program in programs(SIZES, SchedulerLimits(), [GREEDY]):
        runner.lower(program)
    assert before == {id(leaf) for leaf in jax.tree.leaves(runner.state)}  # nothing is donated yet
    ran = {}
    seconds = warm_up(runner, programs(SIZES, SchedulerLimits(), [GREEDY]), on_run=ran.setdefault)
    assert list(seconds) == [*NAMES, FORK, TABLES, MASKS] and min(seconds.values()) >= 0
    assert list(ran) == [
        p for p in programs(SIZES, SchedulerLimits(), [GREEDY]) if isinstance(p, Program)
    ]
    assert 0 < max(ran.values()) < sum(seconds.values())
    assert len(compiled_by) == 6
    assert all(name.startswith("jaxspec-compile") for name in compiled_by)
    assert all(runner.is_warm(program) for program in programs(SIZES, SchedulerLimits(), [GREEDY]))
    assert warm_up(runner, programs(SIZES, SchedulerLimits(), [GREEDY])) == {}


def test_outputs_lie_on_the_host_and_stay(runner):
    """A step writes its own there: nobody asks for a copy, and no later step goes over it."""
    (program, *_) = programs(SIZES, SchedulerLimits(), [GREEDY])
    warm_up(runner, programs(SIZES, SchedulerLimits(), [GREEDY]))
    plan = StepPlan(program, runner._empty_plan(program))
    pending = [runner.dispatch(plan) for _ in range(4)]
    assert pending[0]._packed.sharding.memory_kind == "pinned_host"
    first = np.array(pending[0]._packed)
    assert [np.array_equal(x._packed, first) for x in pending] == [True] * 4
    assert len({x._packed.unsafe_buffer_pointer() for x in pending}) == 4


def test_one_program_moves_for_all_samplers_and_none_where_one_row_has_no_samples():
    assert programs(SIZES, SchedulerLimits(), [GREEDY, SAMPLED]).count(MOVES) == 1
    alone = dataclasses.replace(SIZES, max_num_seqs=1, decode_rows=(1,))
    assert MOVES not in programs(alone, SchedulerLimits(), [GREEDY])


def test_what_keeps_prefixes_is_compiled_where_they_are_kept():
    added = {
        mode: programs(
            dataclasses.replace(SIZES, num_checkpoints=n),
            SchedulerLimits(prefix_caching=mode),
            [GREEDY],
        )
        for mode, n in (("off", 0), ("pages", 0), ("all", 2))
    }
    own = len(added["off"])
    assert [added[mode][own:] for mode in added] == [[], [RESTORE], [RESTORE, EXPORT]]


def test_engines_of_equal_shape_share_what_is_compiled(runner, compiled_by):
    warm_up(runner, programs(SIZES, SchedulerLimits(), [GREEDY]))
    other = make_runner()
    compiled_by.clear()
    assert list(warm_up(other, programs(SIZES, SchedulerLimits(), [GREEDY]))) == [
        *NAMES,
        FORK,
        TABLES,
        MASKS,
    ]
    assert compiled_by == []


def test_an_error_ends_the_others_and_warms_nothing(runner, monkeypatch):
    def fail(program):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(runner, "lower", fail)
    with pytest.raises(RuntimeError, match="no such kernel"):
        warm_up(runner, programs(SIZES, SchedulerLimits(), [GREEDY]))
    assert not any(
        runner.is_warm(program) for program in programs(SIZES, SchedulerLimits(), [GREEDY])
    )
    assert not [t for t in threading.enumerate() if t.name.startswith("jaxspec-compile")]
