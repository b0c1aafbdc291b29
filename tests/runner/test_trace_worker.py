"""A program that another process traced is the one that this process would have made."""

import contextlib
import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from harness import FIXTURES, REPLAY, Harness, model, prompts
from jax import export

from jaxspec import device
from jaxspec.models.base import ModelSpec
from jaxspec.parallel import ALONE, Group
from jaxspec.plan.plan import MOVES, Program
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.runner import trace_worker
from jaxspec.runner.programs import program_cache, trace_processes
from jaxspec.runner.programs.trace_processes import TraceProcesses

DECODE = Program(4, 0, GREEDY)
H200 = device.StandIn("gpu", "NVIDIA H200", "9.0")
GROUPS = [ALONE, pytest.param(Group(2), marks=pytest.mark.devices)]


@pytest.fixture(autouse=True)
def no_stand_in(monkeypatch):
    """What a worker sets for good is undone."""
    monkeypatch.setattr(device, "_stand_in", None)


def request_for(runner, program=DECODE):
    return pickle.loads(runner._blueprint.request(program))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "fixture", sorted({path.parent.name for path in FIXTURES.glob("qwen*/model*.safetensors")})
)
def test_a_recipe_makes_the_model_again(fixture):
    model_spec = ModelSpec.of(model(fixture), jnp.dtype("float32"))
    again, here = (nnx.split(each) for each in (model_spec.model(), model(fixture)))
    assert again[0] == here[0]
    shapes = [
        [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(weights)]
        for _, weights in (again, here)
    ]
    assert shapes[0] == shapes[1]


def traced_there(runner, **changes):
    """By a process of its own."""
    request = pickle.dumps(request_for(runner)._replace(**changes))
    with contextlib.closing(TraceProcesses(1)) as processes:
        return processes.ask(request).result()


def traced_here(runner):
    step = trace_worker.jitted_step(runner._config, DECODE)
    return program_cache.traced(step, runner._args(DECODE), program_cache.platform())


def program_of(content):
    """The choices and the instructions, without the lines of source that they come from."""
    chosen, _, program = content.partition(b"\n")
    text = export.deserialize(bytearray(program)).mlir_module()
    return chosen, re.sub(r"#loc\d* = .*\n|#loc\d*", "", text)


@pytest.mark.soak
@pytest.mark.parametrize("group", GROUPS)
def test_a_worker_keeps_what_this_process_would(group):
    """A worker has no devices, so it does not count those of a group in the module's head."""
    runner = Harness("qwen3_5", drafts=2, feature_sets=(), group=group).runner
    there, here = program_of(traced_there(runner)), program_of(traced_here(runner))
    here = here[0], here[1].replace(f"partitions = {group.size}", "partitions = 1")
    assert there == here and here[1].count("all_reduce") == (2 * 4 if group.size > 1 else 0)


@pytest.mark.gpu
def test_kernels_traced_without_a_gpu_are_those_traced_with_one():
    runner = Harness("qwen3_5", drafts=2, feature_sets=(), states=REPLAY).runner
    there, here = program_of(traced_there(runner)), program_of(traced_here(runner))
    assert there == here and "mosaic_gpu" in there[1]


def test_a_worker_refuses_to_make_another_program():
    request = request_for(Harness("qwen3_5", drafts=2, feature_sets=()).runner)
    fewer = request_for(Harness("qwen3_5", drafts=1, feature_sets=()).runner)
    others = [
        {"program": Program(4, 64, GREEDY)},
        {"config": fewer.config},
        {"arguments": fewer.arguments},
        {"model_spec": request.model_spec._replace(dtype=jnp.dtype("bfloat16"))},
    ]
    for other in others:
        with pytest.raises(ValueError, match="would make another of it"):
            trace_worker.trace(request._replace(**other))


def test_a_worker_takes_over_how_jax_is_set():
    request = request_for(Harness("qwen3_5", feature_sets=()).runner)
    before = jax.config.jax_default_prng_impl
    settings = request.settings | {"jax_default_prng_impl": "rbg"}
    try:
        trace_worker.trace(request._replace(settings=settings))
        assert jax.config.jax_default_prng_impl == "rbg" != before
    finally:
        jax.config.update("jax_default_prng_impl", before)
    assert not [name for name in settings if "cache" in name or "platform" in name]


def test_what_cannot_be_pickled_is_traced_here(monkeypatch, tmp_path):
    runner = Harness("qwen3_5", feature_sets=()).runner
    monkeypatch.setattr(program_cache, "_folder", lambda: tmp_path / "programs")
    monkeypatch.setattr(trace_processes, "num_processes", lambda count: count)
    blueprint = dataclasses.replace(
        runner._blueprint, model_spec=lambda: "a function of this test's"
    )
    monkeypatch.setattr(runner, "_blueprint", blueprint)
    monkeypatch.setattr(trace_processes, "_started", lambda: pytest.fail("a process was started"))
    assert list(runner.trace_ahead([DECODE])) == [DECODE]


def run(**options):
    engine = Harness("qwen3_5", drafts=1, states=REPLAY, steps_per_dispatch=2, **options)
    for prompt in prompts(2):
        engine.add(prompt)
    engine.run()
    return engine.runner, [list(request.output) for request in engine.requests]


@pytest.mark.soak
@pytest.mark.parametrize("group", GROUPS)
def test_programs_traced_by_processes_give_the_same_tokens(group, monkeypatch, tmp_path):
    """Nothing but the copies, which have no kernel, is traced in this process."""
    _, tokens = run(group=group)
    traced = []

    def note(step, args, platform):
        traced.append(step.__name__)
        return real(step, args, platform)

    real = program_cache.traced
    monkeypatch.setattr(program_cache, "traced", note)
    monkeypatch.setattr(program_cache, "_folder", lambda: tmp_path / "programs")
    monkeypatch.setattr(program_cache, "_calls", {})
    monkeypatch.setattr(trace_processes, "num_processes", lambda count: count)
    runner, again = run(group=group)
    assert again == tokens
    assert traced == ["moves", "tables"]
    assert len(list((tmp_path / "programs").iterdir())) == 5
    compiled = runner.lower(DECODE).compile()
    state = jax.tree.leaves(runner.state.of(DECODE))
    held = sum(leaf.nbytes for leaf in state) // group.size
    assert compiled.memory_analysis().alias_size_in_bytes == held
    asked = []
    monkeypatch.setattr(trace_processes, "num_processes", lambda count: asked.append(count) or 0)
    monkeypatch.setattr(program_cache, "_calls", {})
    assert run(group=group)[1] == tokens and asked == [0]


@pytest.mark.soak
def test_programs_that_processes_fail_to_trace_are_traced_here(monkeypatch, tmp_path):
    _, tokens = run()
    monkeypatch.setattr(program_cache, "_folder", lambda: tmp_path / "programs")
    monkeypatch.setattr(program_cache, "_calls", {})
    monkeypatch.setattr(trace_processes, "num_processes", lambda count: count)
    monkeypatch.setattr(trace_processes, "_WORKER", "raise SystemExit(1)")
    assert run()[1] == tokens


def test_the_copies_are_never_asked_for(monkeypatch, tmp_path):
    runner = Harness("qwen3_5", feature_sets=()).runner
    monkeypatch.setattr(program_cache, "_folder", lambda: tmp_path / "programs")
    asked = []
    monkeypatch.setattr(trace_processes, "num_processes", lambda count: asked.append(count) or 0)
    assert list(runner.trace_ahead([DECODE, MOVES])) == [DECODE, MOVES]
    assert asked == [1]


@pytest.mark.mosaic
def test_a_process_without_a_gpu_traces_kernels_for_one():
    runner = Harness("qwen3_5", drafts=2, feature_sets=(), states=REPLAY).runner
    chosen, program = program_of(traced_there(runner, target=H200, platform="cuda"))
    assert b'["slot_mapping", "kernel"' in chosen
    assert program.count("mosaic_gpu") > 0
