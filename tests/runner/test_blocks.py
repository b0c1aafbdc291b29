"""Pieces between the pools and the host: what one engine kept is what another one begins on."""

import dataclasses

import numpy as np
import pytest
from harness import GREEDY, HYBRID, REPLAY, SNAPSHOT, Harness, oracle

from jaxspec.cache.portable import checkpoint_of, pages_of, state_arrays, token_arrays
from jaxspec.plan.block_plan import Block, Read, Write, pack_block
from jaxspec.plan.plan import READ, READ_STATE, WRITE, WRITE_STATE, StepPlan, pack_export
from jaxspec.runner.blocks import Contents
from jaxspec.runner.warmup import of_blocks

PROMPT = tuple(np.random.default_rng(5).integers(0, 256, 22).tolist())
ONE = dataclasses.replace(GREEDY, max_tokens=1)


def engine_of(**options):
    engine = Harness(num_pages=60, **{"prefixes": "all", "num_checkpoints": 5} | options)
    for program in of_blocks(engine.buckets):
        engine.runner.warm_up(program)
    engine.scheduler.prefixes.min_uncached = 100
    return engine


def dispatch(engine, program, copy):
    count = 1 if program.of_state else engine.buckets.block_pages
    engine.runner.dispatch(StepPlan(program, pack_block(copy, count), block=copy.block)).result()
    return copy.block


def ask(engine, prompt, params=GREEDY):
    (request,) = engine.add(prompt, params)
    engine.run()
    return request


def kept_of(engine, length):
    """What an engine keeps of the first `length` tokens of `PROMPT`, in the portable form."""
    engine.scheduler.prefixes.clear()
    ask(engine, PROMPT[:length], ONE)
    store, blocks, runner = engine.scheduler.prefixes.store, engine.runner.blocks, engine.runner
    for export in store.take_copies():
        runner.dispatch(pack_export(export))
    nodes, end = store.tree.match(None, PROMPT, length)
    tail = end if end is not None and len(end.tokens) < engine.buckets.page_size else None
    pages = [node.page for node in (*nodes, *([tail] if tail else []))]
    read, size = [], engine.buckets.block_pages
    for first in range(0, len(pages), size):
        block = Block(is_state=False)
        read.append(dispatch(engine, READ, Read(block, tuple(pages[first : first + size]))))
    contents = [blocks.contents(block).pages for block in read]
    joined = {name: np.concatenate([each[name] for each in contents]) for name in contents[0]}
    arrays = token_arrays(blocks.specs, joined, length)
    if end is not None:
        block = Block(is_state=True)
        dispatch(engine, READ_STATE, Read(block, (0,), end.checkpoint))
        arrays |= state_arrays(blocks.specs, blocks.contents(block).checkpoint, length)
    return arrays


def give(engine, arrays, length):
    """Put the arrays into pages and a state of an engine, as if it had kept them itself."""
    prefixes, blocks = engine.scheduler.prefixes, engine.runner.blocks
    prefixes.clear()
    store, size = prefixes.store, engine.buckets.page_size
    pages = pages_of(blocks.specs, arrays, length, blocks.sizes)
    targets = store.pool.allocate(-(-length // size))
    for place, target in enumerate(targets):
        padded = {
            name: np.repeat(array[place : place + 1], engine.buckets.block_pages, 0)
            for name, array in pages.items()
        }
        block = blocks.block_of(Contents(padded, {}))
        dispatch(engine, WRITE, Write(block, (1,), (target,)))
    node = store.tree.root(None)
    for place, target in enumerate(targets):
        node = store.tree.add(node, PROMPT[place * size : min(length, (place + 1) * size)], target)
    if engine.buckets.num_checkpoints:
        slot = store.free_slots.pop()
        checkpoint = checkpoint_of(blocks.specs, arrays, length, blocks.sizes)
        none = {name: array[:1] for name, array in pages.items()}
        block = blocks.block_of(Contents(none, checkpoint))
        dispatch(engine, WRITE_STATE, Write(block, (0,), (0,), slot))
        store._put(node, (), 0, slot)
    store.pool.release(targets)


KINDS = {
    "to replayed states": (
        {"drafts": 3, "states": SNAPSHOT},
        {"drafts": 1, "states": REPLAY, "page_size": 8},
    ),
    "to snapshots": (
        {"drafts": 1, "states": REPLAY, "page_size": 8},
        {"drafts": 3, "states": SNAPSHOT, "block_pages": 3},
    ),
    "short convolutions": (
        {"fixture": "lfm2", "drafts": 2, "accuracy": (0.5, 0.5), "continuations": [PROMPT]},
        {"fixture": "lfm2", "page_size": 3},
    ),
    "8-bit keys": (
        {"kv_dtype": np.dtype("float8_e4m3fn"), "drafts": 2},
        {"kv_dtype": np.dtype("float8_e4m3fn"), "drafts": 2, "states": REPLAY, "page_size": 8},
    ),
    "attention": (
        {"fixture": "qwen3", "prefixes": "pages"},
        {"fixture": "qwen3", "prefixes": "pages", "page_size": 2},
    ),
}


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_what_one_engine_kept_is_what_another_one_begins_on(kind):
    """Of another page size, ring length, number of slots and state policy."""
    first, second = (engine_of(**options) for options in KINDS[kind])
    has_states = first.buckets.num_checkpoints > 0
    for length in (1, 2, 7, 8, 16, 21) if has_states else (16, 20):
        arrays = kept_of(first, length)
        give(second, arrays, length)
        size = second.buckets.page_size
        hit = second.scheduler.prefixes.find(second.add(PROMPT, GREEDY)[0])
        assert hit.num_cached == (length if has_states else length - length % size)
        again = reread(second, hit, length)
        for name, array in arrays.items():
            np.testing.assert_array_equal(array.view(np.uint8), again[name].view(np.uint8), name)
        second.run()
    if "8-bit" in kind:
        assert second.requests[-1].output == ask(first, PROMPT).output
    else:
        assert second.check() <= 1
    if "states" in KINDS[kind][0]:
        run = oracle(HYBRID).start()
        for token in PROMPT[:length]:
            run.feed(token)
        want = np.stack([memory["state"] for memory in run.memory if "state" in memory])
        np.testing.assert_allclose(arrays["recurrent/states"], want, atol=2e-5, rtol=1e-4)


def reread(engine, hit, length):
    """What the engine has now where a request of `PROMPT` would begin."""
    blocks = engine.runner.blocks
    pages = [*hit.pages, *([hit.tail_page] if hit.tail_page else [])]
    contents = []
    for page in pages:
        block = dispatch(engine, READ, Read(Block(is_state=False), (page,)))
        contents.append({n: x[:1] for n, x in blocks.contents(block).pages.items()})
    joined = {name: np.concatenate([each[name] for each in contents]) for name in contents[0]}
    arrays = token_arrays(blocks.specs, joined, length)
    if hit.checkpoint:
        block = dispatch(engine, READ_STATE, Read(Block(is_state=True), (0,), hit.checkpoint))
        arrays |= state_arrays(blocks.specs, blocks.contents(block).checkpoint, length)
    return arrays


@pytest.fixture(scope="module")
def engine():
    return engine_of(drafts=0)


def test_a_piece_holds_what_was_there_when_it_was_read(engine):
    """Whoever gets the page next; and putting it back is seen by what comes after."""
    ask(engine, PROMPT)
    nodes, _ = engine.scheduler.prefixes.store.tree.match(None, PROMPT, 8)
    pages = tuple(node.page for node in nodes)
    before = np.asarray(engine.runner.state.pools["kv"])
    block = dispatch(engine, READ, Read(Block(is_state=False), pages))
    dispatch(engine, WRITE, Write(block, (0,), (pages[1],)))
    dispatch(engine, WRITE, Write(block, (1,), (pages[0],)))
    after = np.asarray(engine.runner.state.pools["kv"])
    np.testing.assert_array_equal(after[:, :, pages], before[:, :, pages[::-1]])
    others = [page for page in range(before.shape[2]) if page not in (0, *pages)]
    np.testing.assert_array_equal(after[:, :, others], before[:, :, others])
    engine.scheduler.prefixes.clear()


def test_pieces_are_staged_up_to_a_bound_and_put_in_all_the_same(engine, monkeypatch):
    blocks = engine.runner.blocks
    size = blocks.num_bytes(is_state=False)
    read = [dispatch(engine, READ, Read(Block(is_state=False), (page,))) for page in (1, 2, 3)]
    assert sum(array.nbytes for array in read[0].arrays) == size
    monkeypatch.setattr("jaxspec.runner.blocks.MAX_STAGED_BYTES", 2 * size)
    blocks.stage(read)
    assert list(blocks._staged) == read[:2]
    while not all(map(blocks.has_landed, read)):
        pass
    assert blocks.seconds > 0 and not blocks._since
    before = np.asarray(engine.runner.state.pools["kv"])
    for block, page in zip(read, (11, 12, 13), strict=True):
        dispatch(engine, WRITE, Write(block, (0,), (page,)))
    after = np.asarray(engine.runner.state.pools["kv"])
    np.testing.assert_array_equal(after[:, :, 11:14], before[:, :, 1:4])
    blocks.stage(read)
    blocks.stage([])
    assert not blocks._staged and not blocks._since


def test_a_piece_of_a_state_is_bigger_by_the_state_and_has_one_page(engine):
    blocks, shapes = engine.runner.blocks, engine.buckets
    kept = engine.runner.state.checkpoints["recurrent"]
    state = sum(x.nbytes for x in (kept.conv, kept.states)) // (1 + shapes.num_checkpoints)
    page = blocks.num_bytes(is_state=False) // shapes.block_pages
    assert blocks.num_bytes(is_state=True) == state + page
