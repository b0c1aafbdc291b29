"""What processes trace before the weights are read is what the runner asks for afterwards."""

import pytest

from jaxspec import LLM
from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.models import unread
from jaxspec.plan.plan import Program
from jaxspec.runner.blueprint import Blueprint
from jaxspec.runner.programs import program_cache, trace_processes
from jaxspec.runner.warmup import first_programs

OPTIONS = {"max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [16], "max_model_len": 64}
SPECULATION = {"method": "mtp", "num_speculative_tokens": 1}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Programs are kept there, and every process may start."""
    monkeypatch.setattr(program_cache, "_folder", lambda: tmp_path / "programs")
    monkeypatch.setattr(program_cache, "_calls", {})
    monkeypatch.setattr(trace_processes, "num_processes", lambda count: count)
    return tmp_path / "programs"


def make(**options):
    return LLM(**OPTIONS, speculative_config=SPECULATION, background_compilation=True, **options)


def test_a_blueprint_of_shapes_is_that_of_the_weights(monkeypatch):
    made = []

    def make_and_note(*args, **parts):
        made.append((args, parts))
        return of(*args, **parts)

    of = Blueprint.of
    monkeypatch.setattr(Blueprint, "of", make_and_note)
    llm = make()
    runner = llm._compiler._runner
    (((_, *others), parts),) = made
    with unread(EMBEDDED_MODEL, parts["dtype"], load_format="auto") as found:
        before, after = runner._blueprint, of(found.read(False), *others, **parts)
    for program in first_programs(runner.shapes, llm.limits):
        if isinstance(program, Program):
            assert before.fingerprint(program) == after.fingerprint(program) is not None
            assert before.request(program) == after.request(program)
    llm.close()


@pytest.mark.soak
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.devices)])
def test_the_first_programs_are_traced_once_and_before_the_weights(devices, folder, monkeypatch):
    """A second engine finds them on disk and starts no process."""
    asked = []
    ask = trace_processes.TraceProcesses.ask
    monkeypatch.setattr(
        trace_processes.TraceProcesses,
        "ask",
        lambda self, request: asked.append(request) or ask(self, request),
    )
    llm = make(tensor_parallel_size=devices)
    assert len(asked) == 2  # by the time that the constructor returns
    runner = llm._compiler._runner
    steps = [
        program
        for program in first_programs(runner.shapes, llm.limits)
        if isinstance(program, Program)
    ]
    assert set(runner.trace_ahead(steps)) == set(steps)
    assert all(program_cache.is_there(runner._place(program)) for program in steps)
    make(tensor_parallel_size=devices).close()
    assert len(asked) == 2
    llm.close()
