"""Compiled programs live as long as the engines that run them."""

import gc
from pathlib import Path

import pytest
from pairwise import soak

from jaxspec import LLM, SamplingParams
from jaxspec.runner import model_runner
from jaxspec.runner.step import jitted_step

PARAMS = SamplingParams(temperature=0.0, max_tokens=4)
OPTIONS = {"speculative_config": None, "max_model_len": 64, "prefill_buckets": [16]}


@pytest.fixture
def by_engines(monkeypatch):
    """Engines own their programs, which the suite keeps elsewhere."""
    monkeypatch.setattr(model_runner, "jitted_step", jitted_step)


def llm_of(model, num_seqs):
    return LLM(model, max_num_seqs=num_seqs, decode_buckets=[num_seqs], **OPTIONS)


def num_maps():
    gc.collect()
    return Path("/proc/self/maps").read_bytes().count(b"\n")


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="maps are counted on Linux")
@pytest.mark.parametrize("num_shapes", [3, soak(30)])
def test_closed_llms_of_many_shapes_leave_no_programs(num_shapes, short_model, by_engines):
    """A process may have 65,530 maps of memory; a program takes 100 to 300."""
    llm_of(short_model, 1).close()
    before, opened = num_maps(), []
    for num_seqs in range(2, 2 + num_shapes):
        with llm_of(short_model, num_seqs) as llm:
            llm.generate("import os", PARAMS)
            opened.append(num_maps() - before)
    # JAX keeps the small programs that fill arrays of new shapes: 2,048 of them at most.
    assert num_maps() - before < num_shapes * 100
    assert max(opened) < 2 * min(opened) + num_shapes * 100 and min(opened) > 300


@pytest.mark.soak
def test_open_llms_of_one_shape_share_programs(short_model, by_engines):
    first, second = llm_of(short_model, 2), llm_of(short_model, 2)
    told = first.generate("import os", PARAMS)[0].outputs[0].token_ids
    assert second.generate("import os", PARAMS)[0].outputs[0].token_ids == told
    steps = dict(first._runner._steps)
    assert steps and all(second._runner._steps[program] is steps[program] for program in steps)
    first.close()
    assert second.generate("import os", PARAMS)[0].outputs[0].token_ids == told
    second.close()
