"""Prefixes on their way from one scheduler to another, on devices that check every page."""

import pytest
from fake_device import make_group
from loop import Loop

from jaxspec.plan.block_plan import Read, Write
from jaxspec.prefix.cache import copy_in, copy_out
from jaxspec.requests.request import Finish, Request
from jaxspec.scheduler.scheduled_step import ScheduledStep

PAGES = {"prefix_caching": "pages", "block_pages": 2}
ALL = {"prefix_caching": "all", "num_checkpoints": 3, "block_pages": 2}
MODES = pytest.mark.parametrize("mode", [PAGES, ALL], ids=["pages", "all"])


def add_one(loop, *group, **changes):
    ((request,),) = [make_group(*group, **changes)]
    loop.add([request])
    return request


def flush(loop):
    """Have the device make the copies that the next plan would begin with, as an engine does."""
    scheduler = loop.scheduler
    copies = list(scheduler.prefixes.store.copies)
    if copies:
        plan = scheduler.packer.pack_copies(scheduler.running)
        step = ScheduledStep(plan, (), (), 0)
        loop.device.run(scheduler, step)
        assert loop.device.uncollected.pop() is step  # it gives nothing to wait for
    return copies


def end(loop, request):
    """Run until a request has ended, as an engine would; nothing need be left to run then."""
    while not request.finish:
        step = loop.schedule()
        if loop.in_flight and (step is None or len(loop.in_flight) > loop.depth):
            loop.collect()


def take_out(loop, request):
    """A request leaves, once what is in flight for it is over."""
    if request in loop.scheduler.running:
        loop.scheduler.preempt(request)
    while request.in_flight and not request.finish:
        loop.turn()
    copied = copy_out(loop.scheduler.prefixes, request)
    flush(loop)
    loop.scheduler.end(request, Finish.ABORT)
    return copied


def going_on(loop, request):
    """The same request in another loop, with its output so far."""
    who = request.prompt, request.params, request.seed, request.stop_ids, request.proposer_key
    twin = Request(*who)
    twin.tokens = list(request.tokens)
    twin.draft_positions = [0] * twin.num_output
    loop.requests[twin.proposer_key] = twin
    loop.given[twin] = list(twin.output)
    loop.scheduler.add([twin])
    return twin


@MODES
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_request_goes_on_elsewhere_from_what_was_computed(mode, num_steps, depth):
    """Each of four neighbours leaves in turn; the receiver has neighbours of its own."""
    here = Loop(depth=depth, num_drafts=3, chunk=7, accuracy=0.7, **mode)
    there = Loop(depth=2 - depth, num_drafts=1, seed=1, **mode)
    requests = [add_one(here, seed, 5 + 3 * seed, 15) for seed in (1, 2, 3, 4)]
    add_one(there, 9, 13, 20)
    for _ in range(num_steps):
        here.turn()
        there.turn()
    for request in requests:
        if request.finish:
            continue
        copied = take_out(here, request)
        if request.finish is not Finish.ABORT:  # its last tokens were in flight
            continue
        if request.output and mode is ALL:
            assert copied.num_tokens == len(request.tokens) - 1
        twin = going_on(there, request)
        copy_in(there.scheduler.prefixes, twin, copied)
        flush(there)
        there.turn()
        if twin.slot:  # it is in the batch
            assert twin.num_cached_tokens == copied.num_tokens
    here.run()
    there.run()


@MODES
def test_what_is_here_already_is_not_brought(mode):
    here, there = Loop(**mode), Loop(**mode)
    request = add_one(here, 1, 14, 6)
    for _ in range(4):
        here.turn()
    copied = take_out(here, request)
    assert copied.num_tokens > 11 and len(copied.pages) == 2
    twin = make_group(1, 14, 6)[0]
    twin.tokens = list(request.tokens)
    prefixes = there.scheduler.prefixes
    copy_in(prefixes, twin, copied)
    first = flush(there)
    assert all(isinstance(copy, Write) for copy in first) and len(first) == 2 + (mode is ALL)
    copy_in(prefixes, twin, copied)
    assert not prefixes.store.copies and prefixes.find(twin).num_cached == copied.num_tokens
    again = copy_out(prefixes, twin)  # from there it could travel on
    reads = flush(there)
    assert again.num_tokens == copied.num_tokens
    assert all(isinstance(copy, Read) for copy in reads) and len(reads) == len(first)
    assert [block.arrays for block in again.pages][0][0][0].tolist() == twin.tokens[:4]


@MODES
def test_pages_that_requests_need_are_not_taken(mode):
    """Then nothing is brought; what lies there unused makes room."""
    here, there = Loop(**mode), Loop(num_pages=8, **mode)
    request = add_one(here, 1, 16, 6)
    for _ in range(3):
        here.turn()
    copied = take_out(here, request)
    busy = add_one(there, 2, 17, 8)
    for _ in range(2):
        there.turn()
    twin = make_group(1, 16, 6)[0]
    twin.tokens = list(request.tokens)
    copy_in(there.scheduler.prefixes, twin, copied)
    assert not there.scheduler.prefixes.store.copies and len(busy.pages) > 4
    there.run()
    copy_in(there.scheduler.prefixes, twin, copied)
    flush(there)
    assert there.scheduler.prefixes.find(twin).num_cached == copied.num_tokens


def test_engines_that_keep_nothing_or_something_else_take_nothing():
    here = Loop(**ALL)
    request = add_one(here, 1, 14, 6)
    for _ in range(3):
        here.turn()
    copied = take_out(here, request)
    for mode in ({}, PAGES):
        there = Loop(**mode)
        copy_in(there.scheduler.prefixes, request, copied)
        assert not there.scheduler.prefixes.store.copies
    assert copy_out(Loop().scheduler.prefixes, request).num_tokens == 0


@MODES
@pytest.mark.parametrize("prompt_len", [2, 5, 8, 9, 20])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_request_to_be_prefilled_leaves_before_its_last_token(mode, prompt_len, depth):
    """And gets no token; one beside it goes on. A second time all of it is found."""
    loop = Loop(depth=depth, chunk=7, num_drafts=2, **mode)
    add_one(loop, 5, 6, 20)
    for seed in (1, 2):
        (request,) = make_group(seed, prompt_len, 5, root=prompt_len)
        request.is_prefill_only = True
        loop.add([request])
        end(loop, request)
        assert request.finish is Finish.ABORT and request.output == []
        assert request.num_computed == prompt_len - 1
        found = loop.scheduler.prefixes.find(request).num_cached
        assert found == (prompt_len - 1 if mode is ALL else (prompt_len - 1) // 4 * 4)
    loop.run()


def test_a_request_to_be_prefilled_alone_leaves_an_idle_engine():
    loop = Loop(**ALL)
    (request,) = make_group(1, 9, 5)
    request.is_prefill_only = True
    loop.add([request])
    end(loop, request)
    assert not loop.scheduler.has_work
    assert request.finish is Finish.ABORT and not loop.scheduler._forked_samples.prefilled()
