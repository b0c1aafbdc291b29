"""What is held is told without holding it, and as many pages are taken as fit beside the rest."""

import dataclasses
import re

import jax
import pytest
from harness import FIXTURES

from jaxspec import LLM
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.runner import memory
from jaxspec.runner.memory import MemoryBudget, fit, memory_map

BUCKETS = StepShapes(
    max_num_seqs=4,
    max_model_len=64,
    page_size=16,
    num_pages=17,
    num_drafts=0,
    decode_rows=(4,),
    prefill_tokens=(64,),
)
LEAST = 5  # one sample's pages and the null page


def held_with(buckets):
    """1000 bytes of weights, 100 a slot, 10 a page."""
    held = {"weights": 1000, "states": 100 * buckets.num_slots, "kv": 10 * buckets.num_pages}
    return held | {"ring": 0}


def pages(max_bytes, *, fixed=False, **changes):
    budget = MemoryBudget(2 * max_bytes, 0.5, fixed)
    return fit(dataclasses.replace(BUCKETS, **changes), 0.0, budget, held_with).num_pages


@pytest.mark.parametrize(
    ("max_bytes", "want"),
    [(10**9, 17), (1670, 17), (1669, 16), (1600, 10), (1559, 5), (1550, LEAST)],
)
def test_as_many_pages_as_fit_and_are_needed(max_bytes, want):
    assert pages(max_bytes) == want


def test_pages_the_user_asked_for_are_taken_or_refused():
    assert pages(1670, fixed=True) == 17
    assert pages(1530, fixed=True, num_pages=3) == 3  # less than a long sample needs: his choice
    with pytest.raises(ValueError, match=r"with num_pages \(17\) they would take"):
        pages(1669, fixed=True)


@pytest.mark.parametrize("max_bytes", [1549, 1400, 10])
def test_without_room_for_one_sample_there_is_an_error(max_bytes):
    with pytest.raises(ValueError) as caught:
        pages(max_bytes)
    share = f"gpu_memory_utilization=0.5 of the {memory.human(2 * max_bytes)}"
    assert str(caught.value) == (
        f"Weights and caches must fit {share} that JAX may use, {memory.human(max_bytes)}; with "
        "the pages of one sample of max_model_len (5) they would take\n"
        "  weights         1.0 KiB\n"
        "  states          0.5 KiB  5 slots\n"
        "  kv              0.0 KiB  5 pages of 16 tokens\n"
        "  total           1.5 KiB\n"
        "Lower max_num_seqs or max_model_len, or keep less with state_policy='replay', "
        "state_dtype='float16' or kv_dtype='float8_e4m3fn'; or raise gpu_memory_utilization, or "
        "what JAX may use of a GPU, by XLA_PYTHON_CLIENT_MEM_FRACTION."
    )


@pytest.mark.parametrize(
    ("size", "words"),
    [(1023, "1.0 KiB"), (2**20 - 103, "1023.9 KiB"), (2**20, "1.0 MiB"), (19 * 10**9, "17.7 GiB")],
)
def test_sizes_are_in_human_units(size, words):
    first, last = memory_map({"weights": size, "kv": 0}, BUCKETS).splitlines()
    assert first.split(maxsplit=1) == ["weights", words]
    assert last.split(maxsplit=1) == ["total", words]


OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_model_len": 256,
    "state_policy": "replay",
    "speculative_config": {
        "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
    },
}


def test_an_engine_holds_what_was_computed_and_stays_inside(device_with):
    device_with(None)
    free = LLM(FIXTURES / "qwen3_5", **OPTIONS)
    assert free.shapes.num_pages == 65
    held = free.metrics()["memory_bytes"]
    assert {name for name, size in held.items() if not size} == {"proposer_tables"}
    leaves = jax.tree.leaves((free._runner._weights, free._runner.state))
    assert sum(held.values()) == sum(leaf.nbytes for leaf in leaves)

    device_with(sum(held.values()) + 6, in_use=7)  # by another engine
    tight = LLM(FIXTURES / "qwen3_5", **OPTIONS, gpu_memory_utilization=1.0)
    assert tight.shapes.num_pages == tight._runner.shapes.num_pages == 64
    num_free = tight.session.scheduler.pages.num_free
    assert tight._runner.state.pools["kv"].shape[2] == num_free + 1 == 64
    assert re.search(r"kv .* 64 pages of 16 tokens", tight.memory_map())
    with pytest.raises(ValueError, match=r"num_pages \(65\)"):
        LLM(FIXTURES / "qwen3_5", **OPTIONS, num_pages=65, gpu_memory_utilization=1.0)
    with pytest.raises(ValueError, match="one sample of max_model_len"):
        LLM(FIXTURES / "qwen3_5", **OPTIONS, gpu_memory_utilization=0.1)


def held_with_states(shapes):
    """As `held_with`, and 40 bytes a checkpoint, of which one is null."""
    count = shapes.num_checkpoints
    return held_with(shapes) | {"checkpoints": 40 * (1 + count) if count else 0}


@pytest.mark.parametrize("share", [0.1, 0.25, 0.8])
@pytest.mark.parametrize("max_bytes", [1700, 2000, 3300, 10**6])
def test_pages_and_checkpoints_fill_what_is_there_and_no_more(max_bytes, share):
    budget = MemoryBudget(max_bytes, 1.0, False)
    shapes = dataclasses.replace(BUCKETS, num_pages=400)
    try:
        found = fit(shapes, share, budget, held_with_states)
    except ValueError:  # not even a sample's pages and two checkpoints
        assert max_bytes <= 2000
        return
    assert sum(held_with_states(found).values()) <= max_bytes
    assert found.num_checkpoints >= 2 and LEAST <= found.num_pages <= 400
    more = dataclasses.replace(found, num_pages=found.num_pages + 8)
    assert found.num_pages == 400 or sum(held_with_states(more).values()) > max_bytes
    alone = fit(shapes, share, None, held_with_states)
    assert alone.num_pages == 400
    assert alone.num_checkpoints == int(400 * 10 * share / (1 - share) / 40)
