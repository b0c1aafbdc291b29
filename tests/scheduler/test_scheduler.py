import numpy as np
import pytest
from fake_device import expected_output, make_buckets, make_group
from loop import Loop, random_group
from pairwise import crossed

from jaxspec.plan.plan import TABLES
from jaxspec.plan.step_shapes import SchedulerLimits
from jaxspec.plan.table_plan import table_layout
from jaxspec.requests.request import Finish
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.scheduler.request_observer import RequestObserver
from jaxspec.scheduler.scheduler import Scheduler


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "num_drafts, page_size, chunk, steps_per_dispatch",
    crossed((0, 1, 3), (1, 4, 16), (1, 7, 64), (1, 3)),
)
def test_a_random_walk_gives_every_request_what_it_gets_alone(
    num_drafts, page_size, chunk, steps_per_dispatch
):
    seed = num_drafts * 100 + page_size * 1000 + chunk
    random = np.random.default_rng(seed)
    # The pool: from just one longest request (the rest is preempted) to enough for all.
    longest = -(-40 // page_size)
    counts = np.zeros(4, int)
    for walk, num_requests in enumerate([1, 2, 5]):
        loop = Loop(
            num_drafts=num_drafts,
            page_size=page_size,
            chunk=chunk,
            num_pages=1 + longest * num_requests,
            steps_per_dispatch=steps_per_dispatch,
            seed=seed + walk,
        )
        next_seed = 1
        for turn in range(120):
            if random.random() < 0.25:
                group = random_group(random, next_seed, max_samples=7)
                next_seed += len(group)
                loop.add(group)
            if random.random() < 0.05 and loop.requests:
                victim = loop.requests[int(random.choice(list(loop.requests)))]
                loop.scheduler.end(victim, Finish.ABORT)
            if turn % 10 == 0:
                loop.depth = int(random.integers(0, 4))
            if loop.scheduler.has_work:
                loop.turn()
        loop.run()
        aborts = sum(request.finish == Finish.ABORT for request in loop.requests.values())
        preemptions = loop.scheduler.num_preemptions
        counts += [loop.num_steps, preemptions, loop.device.num_forks, aborts]
    num_steps, num_preemptions, num_forks, num_aborts = counts
    assert num_steps > 300 and num_preemptions > 5 and num_forks > 2 and num_aborts > 1


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
@pytest.mark.parametrize("prompt_len", [1, 2, 8, 9, 21])
@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("depth", [0, 2])
def test_without_drafts_exactly_prompt_plus_max_tokens_less_one_are_computed(
    max_tokens, prompt_len, chunk, depth
):
    loop = Loop(depth=depth, chunk=chunk)
    loop.add(make_group(1, prompt_len, max_tokens))
    loop.run()
    assert loop.device.num_scheduled == prompt_len + max_tokens - 1
    assert loop.device.num_wasted == 0
    # A tail of one prompt token is a chunk like any other.
    assert loop.num_steps == -(-prompt_len // chunk) + max_tokens - 1


@pytest.mark.parametrize("depth", [0, 2])
def test_several_steps_are_dispatched_at_once_where_all_are_needed(depth):
    """A prompt, then 10 tokens one by one: 4, 4, 1 and 1 steps."""
    loop = Loop(depth=depth, steps_per_dispatch=4)
    loop.add(make_group(1, 5, 11))
    loop.run()
    assert loop.device.num_scheduled == 5 + 11 - 1
    assert loop.device.num_wasted == 0
    assert loop.num_steps == 1 + 4


def test_while_a_prompt_waits_steps_come_one_by_one():
    """The second has no row before the first ends; only then may it go on by fours."""
    loop = Loop(steps_per_dispatch=4, max_num_seqs=1, decode_rows=(1,))
    loop.add(make_group(1, 5, 9), make_group(2, 5, 9))
    loop.run()
    assert loop.num_steps == (1 + 8) + (1 + 2)


def test_while_somebody_reads_a_stream_steps_come_one_by_one():
    loop = Loop(steps_per_dispatch=4)
    streamed, other = make_group(1, 5, 5), make_group(2, 5, 21)
    streamed[0].is_streamed = True
    loop.add(streamed, other)
    steps = []
    while loop.scheduler.has_work:
        steps.append(loop.turn().plan.num_steps)
    assert steps == [1, 1, 1, 1, 1, 4, 4, 4, 4]


@pytest.mark.parametrize(("num_drafts", "num_pages"), [(0, 20), (1, 22), (3, 24)])
@pytest.mark.parametrize("steps_per_dispatch", [1, 4])
def test_nobody_is_preempted_for_steps_that_could_come_one_by_one(
    num_drafts, num_pages, steps_per_dispatch
):
    """Pages for what each step needs, as requests end, but not for what four might need."""
    sizes = {"num_drafts": num_drafts, "num_pages": num_pages, "max_num_seqs": 4}
    loop = Loop(steps_per_dispatch=steps_per_dispatch, accuracy=0.0, decode_rows=(4,), **sizes)
    loop.add(*(make_group(1 + i, 5, tokens) for i, tokens in enumerate([10, 20, 30, 33])))
    loop.run()
    assert loop.scheduler.num_preemptions == 0


def test_the_rows_that_end_first_idle_until_the_dispatch_is_over():
    loop = Loop(steps_per_dispatch=4)
    loop.add(make_group(1, 5, 3), make_group(2, 5, 9))
    loop.run()
    assert loop.num_steps == 1 + 2
    assert loop.device.num_wasted == 2


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_no_drafts_make_a_step_of_several_one_too_many(accuracy):
    loop = Loop(steps_per_dispatch=2, num_drafts=3, accuracy=accuracy)
    loop.add(make_group(1, 5, 33))
    steps = []
    while loop.scheduler.has_work:
        steps.append(loop.turn().plan.num_steps)
    assert loop.device.num_wasted == 0
    assert set(steps) == {1, 2} and steps.count(2) > 2


def test_at_depth_zero_no_step_is_wasted_on_a_request_that_met_its_stop_id():
    group = make_group(3, 5, 30)
    stop = expected_output(group[0])[0][6]
    loop = Loop(num_drafts=0)
    loop.add(make_group(3, 5, 30, stop_ids=(stop,)))
    loop.run()
    (request,) = loop.requests.values()
    assert request.finish == Finish.STOP and request.output[-1] == stop
    assert loop.device.num_wasted == 0
    assert loop.device.num_scheduled == 5 + len(request.output) - 1


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_a_row_whose_drafts_all_stand_or_all_fall_is_not_dispatched_past_its_end(
    accuracy, depth, num_drafts
):
    """What stood so far says how many tokens are in flight."""
    loop = Loop(depth=depth, num_drafts=num_drafts, accuracy=accuracy)
    loop.add(make_group(1, 6, 30))
    loop.run()
    assert loop.device.num_wasted == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("accuracy", [0.6, 1.0])
def test_rows_ride_along_past_their_end_while_another_surely_needs_the_step(accuracy, seed):
    loop = Loop(depth=3, num_drafts=3, accuracy=accuracy, seed=seed)
    loop.add(make_group(1, 6, 6), make_group(2, 6, 30))
    _, longer = loop.requests.values()
    while loop.scheduler.has_work:
        needs_it = not longer.finish and longer.tokens_bound < longer.max_len
        assert loop.turn() is not None or not needs_it
    assert loop.device.num_wasted > 0


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_device_never_waits_while_a_step_is_surely_due(depth, num_drafts):
    """With every draft rejected each step gives one token, and all are planned without a gap."""
    loop = Loop(depth=depth, num_drafts=num_drafts, accuracy=0.0)
    loop.add(make_group(1, 6, 20))
    assert all(loop.turn() is not None for _ in range(20))
    loop.run()
    assert loop.num_steps == 20


@pytest.mark.parametrize(
    ("prompt_len", "page_size", "num_copied"), [(9, 4, 0), (8, 4, 3), (2, 4, 3), (7, 1, 0)]
)
@pytest.mark.parametrize("chunk", [3, 16])
def test_samples_fork_off_one_prefill_and_copy_only_the_partial_page(
    prompt_len, page_size, num_copied, chunk
):
    loop = Loop(depth=2, page_size=page_size, num_drafts=3, chunk=chunk)
    loop.add(make_group(1, prompt_len, 6, n=4))
    loop.run()
    prefilled = [length for _, prefills in loop.device.log for _, length in prefills]
    assert sum(prefilled) == prompt_len - 1, "the last token is each sample's own"
    assert loop.device.num_forks == 3
    assert loop.device.num_copied_pages == num_copied


def test_samples_of_a_one_token_prompt_run_alone():
    loop = Loop(num_drafts=1)
    loop.add(make_group(1, 1, 4, n=4))
    loop.run()
    assert loop.device.num_forks == 0


def test_more_samples_than_rows_all_end():
    loop = Loop(depth=1, max_num_seqs=2, decode_rows=(2,), num_drafts=1)
    loop.add(make_group(1, 6, 5, n=5), make_group(11, 3, 5))
    loop.run()
    assert loop.device.num_forks == 1


def test_more_samples_than_may_enter_in_one_step_all_fork():
    """At most 8 rows may be new in a step: the leader waits for the others."""
    loop = Loop(depth=1, max_num_seqs=12, decode_rows=(12,))
    loop.add(make_group(1, 6, 5, n=12))
    loop.run()
    assert loop.device.num_forks == 11
    assert sum(len(prefills) for _, prefills in loop.device.log) == 1


@pytest.mark.parametrize("depth", [0, 3])
def test_ending_a_leader_before_the_fork_lets_its_samples_run_alone(depth):
    loop = Loop(depth=depth, chunk=3)
    group = make_group(1, 12, 4, n=3)
    loop.add(group)
    loop.turn()
    loop.scheduler.end(group[0], Finish.ABORT)
    loop.run()
    assert loop.device.num_forks == 0
    assert [request.finish for request in group] == [Finish.ABORT, Finish.LENGTH, Finish.LENGTH]


def test_ending_a_sample_that_waits_to_fork_leaves_the_others():
    loop = Loop(chunk=3)
    group = make_group(1, 12, 4, n=3)
    loop.add(group)
    loop.turn()
    loop.scheduler.end(group[1], Finish.ABORT)
    loop.run()
    assert loop.device.num_forks == 1


def test_chunks_of_several_prompts_share_the_budget_in_order():
    loop = Loop(chunk=7, page_size=1)
    loop.add(make_group(1, 5, 2), make_group(2, 10, 2), make_group(3, 3, 2))
    loop.run()
    assert [prefills for _, prefills in loop.device.log][:3] == [
        [(1, 5), (2, 2)],
        [(2, 7)],
        [(3, 3)],  # the last token of request 2 runs as a decode row
    ]
    assert loop.device.log[2][0] == [2]


def test_a_prompt_of_eleven_with_ten_computed_ends_as_a_decode_row():
    loop = Loop(chunk=10, num_drafts=3)
    loop.add(make_group(1, 11, 3))
    loop.run()
    assert loop.device.log[0] == ([], [(1, 10)])
    assert loop.device.log[1] == ([1], [])


def test_rows_that_decode_come_before_rows_that_prefill():
    """Tokens due {p1: 100, d1: 1, p2: 7, d2: 1}: d1, d2 decode; prompts follow as they came."""
    loop = Loop(chunk=16, max_prefill_seqs=2)
    loop.add(make_group(1, 2, 9), make_group(2, 2, 9))
    loop.turn()
    loop.add(make_group(3, 14, 2), make_group(4, 7, 2))
    loop.turn()
    assert loop.device.log[-1] == ([1, 2], [(3, 14), (4, 2)])


def test_a_chunk_as_wide_as_a_verify_is_no_decode():
    loop = Loop(chunk=4, num_drafts=3)
    loop.add(make_group(1, 12, 3))
    loop.run()
    assert [log for log in loop.device.log if log[1]] == [([], [(1, 4)])] * 3


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_admission_is_first_come_first_served(num_drafts):
    random = np.random.default_rng(num_drafts)
    # A third of the pages: many are preempted, and still nobody overtakes.
    loop = Loop(depth=2, num_drafts=num_drafts, num_pages=18)
    groups = [random_group(random, seed, max_samples=1) for seed in range(1, 40)]
    for group in groups:
        loop.add(group)
        loop.turn()
    while loop.scheduler.has_work:
        loop.turn()
        waiting, running = loop.scheduler.waiting, loop.scheduler.running
        seeds = [request.seed for request in (*running, *waiting)]
        assert seeds == sorted(seeds), "the last to come is the first to go and the last to return"
    loop.run()
    assert loop.scheduler.num_preemptions > 0
    assert [request.seed for request in loop.device.admitted] == list(range(1, 40))


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_urgent_requests_enter_first_and_go_last(num_drafts):
    """Among equals it stays first come first served, and every request gets its own tokens."""
    random = np.random.default_rng(num_drafts)
    loop = Loop(depth=2, num_drafts=num_drafts, num_pages=18)
    groups = [random_group(random, seed, max_samples=2) for seed in range(1, 80, 2)]
    for group in groups:
        priority = int(random.integers(-1, 2))
        for request in group:
            request.priority = priority
        loop.add(group)
        loop.turn()
    while loop.scheduler.has_work:
        before = {request: len(request.pages) for request in loop.scheduler.running}
        loop.turn()
        waiting, running = loop.scheduler.waiting, loop.scheduler.running
        for requests in (waiting, running):
            priorities = [request.priority for request in requests]
            assert priorities == sorted(priorities)
        gone = [request.priority for request in waiting if request in before]
        stayed = [request.priority for request in running if request in before]
        assert not gone or not stayed or min(gone) >= max(stayed), "the least urgent goes first"
    loop.run()
    assert loop.scheduler.num_preemptions > 0


def preempted(depth=3, **sizes):
    """A loop in which request 2 was just preempted with steps in flight for it."""
    loop = Loop(depth=depth, num_pages=11, page_size=4, accuracy=1.0, **sizes)
    loop.add(make_group(1, 6, 30), make_group(2, 6, 30))
    while not loop.scheduler.num_preemptions:
        loop.turn()
    request = loop.requests[2]
    assert loop.scheduler.waiting[0] is request and not request.pages
    return loop, request


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_late_results_of_a_preempted_request_are_kept(num_drafts):
    loop, request = preempted(num_drafts=num_drafts)
    before = len(request.output)
    assert request.in_flight > 0
    loop.drain()
    assert len(request.output) > before
    assert request.in_flight == request.in_flight_bound == 0
    loop.run()


def test_a_preempted_request_comes_back_only_after_its_outputs_arrived():
    loop, request = preempted(num_drafts=1)
    loop.scheduler.end(loop.requests[1], Finish.ABORT)  # room enough now
    while request.in_flight:
        loop.turn()
        assert request in loop.scheduler.waiting or not request.in_flight
    loop.turn()
    assert request in loop.scheduler.running
    assert request.prefill_len == len(request.prompt) + len(request.output) > len(request.prompt)
    loop.run()


def test_a_preempted_request_that_had_finished_on_the_device_ends_without_coming_back():
    loop = Loop(depth=3, num_pages=8, page_size=4, num_drafts=0)
    stop = expected_output(make_group(2, 6, 16)[0])[0][6]
    loop.add(make_group(1, 6, 20), make_group(2, 6, 16, stop_ids=(stop,)))
    request = loop.requests[2]
    while not loop.scheduler.num_preemptions:
        loop.turn()
    assert not request.finish and request.in_flight
    loop.run()
    assert request.finish == Finish.STOP and request.generation == 1


@pytest.mark.parametrize("depth", [0, 3])
def test_who_follows_requests_hears_that_one_leaves_while_its_pages_are_its_own(depth):
    """At its end and where it is preempted; a request that never ran does not leave."""
    loop, heard = Loop(depth=depth, num_pages=8, page_size=4, num_drafts=0), []

    class Listening(RequestObserver):
        def leave(self, request):
            pages = loop.scheduler.pages
            assert len(request.pages) * 4 >= len(request.tokens) - 1
            assert all(pages._references[page] for page in request.pages)
            heard.append((request.seed, bool(request.finish)))

        def remove(self, request):
            assert request.finish and not request.pages
            heard.append((request.seed, "removed"))

    loop.scheduler.observers = (Listening(),)
    loop.add(make_group(1, 6, 20), make_group(2, 6, 16), make_group(3, 6, 2))
    loop.scheduler.end(loop.requests[3], Finish.ABORT)
    loop.run()
    assert loop.scheduler.num_preemptions > 0
    assert heard[0] == (3, "removed") and (3, True) not in heard
    assert heard.count((2, False)) == loop.scheduler.num_preemptions
    for seed in (1, 2):
        assert heard.index((seed, "removed")) == heard.index((seed, True)) + 1


@pytest.mark.parametrize("depth", [1, 3])
def test_late_results_of_an_aborted_request_are_ignored(depth):
    loop = Loop(depth=depth, num_drafts=3)
    loop.add(make_group(1, 6, 20), make_group(2, 6, 20))
    for _ in range(4):
        loop.turn()
    request = loop.requests[1]
    before = list(request.tokens)
    assert loop.in_flight
    loop.scheduler.end(request, Finish.ABORT)
    loop.scheduler.end(request, Finish.STOP)  # ends once
    loop.add(make_group(3, 9, 5))  # takes its row, slot and pages while it is in flight
    loop.run()
    assert request.tokens == before and request.finish == Finish.ABORT


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("has_ended", [False, True])
def test_a_request_cut_at_a_stop_string_keeps_the_tokens_up_to_it(depth, has_ended):
    """What was in flight is ignored; if the device ended it behind the string, that is, too."""
    loop = Loop(depth=depth, num_drafts=3)
    loop.add(make_group(1, 5, 12))
    (request,) = loop.requests.values()
    while not (request.finish if has_ended else request.num_output >= 3):
        loop.turn()
    kept = request.output[:2]
    loop.scheduler.cut(request, 2)
    assert request.finish == Finish.STOP and request.metrics.num_tokens == 2
    loop.drain()
    assert request.output == kept and not request.pages and not loop.scheduler.has_work


def test_an_idle_row_is_kept_until_it_decodes_again():
    """At depth 3 a row that waits for its last results stays where it is, and is not dispatched."""
    loop = Loop(depth=3, num_drafts=0)
    loop.add(make_group(1, 4, 3), make_group(2, 4, 12))
    loop.run()
    assert [len(decodes) for decodes, _ in loop.device.log] == [0, 2, 2] + [1] * 9


def test_the_program_can_do_what_the_most_demanding_row_needs():
    loop = Loop()
    loop.add(
        make_group(1, 3, 3, temperature=0.0),
        make_group(2, 3, 6, temperature=1.0),
        make_group(3, 3, 4, temperature=1.0, top_p=0.5),
    )
    words = []
    while loop.scheduler.has_work:
        words.append(str(loop.turn().plan.program.features))
    assert words == ["full"] * 4 + ["sampled"] * 2
    loop = Loop()
    loop.add(make_group(1, 3, 3, temperature=0.0, top_p=0.5))
    assert loop.turn().plan.program.features == GREEDY


def test_statistics_count_the_drafts_that_were_verified():
    loop = Loop(depth=2, num_drafts=3, accuracy=1.0)
    loop.add(make_group(1, 6, 30))
    loop.run()
    metrics = loop.requests[1].metrics
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 0
    assert metrics.num_tokens == 30
    assert metrics.first_token_time <= metrics.last_token_time
    loop = Loop(depth=2, num_drafts=3, accuracy=0.0)
    loop.add(make_group(1, 6, 30))
    loop.run()
    metrics = loop.requests[1].metrics
    assert metrics.num_accepted_tokens == 0 < metrics.num_drafts
    assert metrics.mean_acceptance_length == 1.0


def test_a_request_keeps_the_time_of_its_first_row_when_it_is_preempted():
    loop = Loop()
    loop.add(make_group(1, 6, 30))
    metrics = loop.requests[1].metrics
    assert metrics.scheduled_time is None
    loop.turn()
    first = metrics.scheduled_time
    loop.turn()
    loop.scheduler.preempt(loop.requests[1])
    loop.run()
    assert loop.requests[1].generation == 2 and metrics.scheduled_time == first


def test_a_request_that_can_never_run_is_refused():
    scheduler = Scheduler(
        make_buckets(max_model_len=40, page_size=4, num_pages=6), SchedulerLimits()
    )
    scheduler.check(make_group(1, 10, 10))
    with pytest.raises(ValueError, match="21 tokens need 6 pages of 4, the pool has 5"):
        scheduler.check([*make_group(1, 2, 2), *make_group(2, 11, 10)])
    assert not scheduler.has_work


@pytest.mark.parametrize("cut", ["pages.release", "_forked_samples.dismiss"])
def test_a_reset_finds_every_slot_and_page_wherever_an_interrupt_cut_the_books(cut, monkeypatch):
    scheduler = Scheduler(make_buckets(max_num_seqs=3, decode_rows=(3,)), SchedulerLimits())
    requests = make_group(3, 9, 6, n=2) + make_group(20, 5, 4) + make_group(30, 5, 4)
    scheduler.add(requests)
    for _ in range(3):
        scheduler.schedule()
    leaving = scheduler.running[0]
    part, method = cut.split(".")

    def interrupt(*args):
        raise MemoryError

    monkeypatch.setattr(getattr(scheduler, part), method, interrupt)
    with pytest.raises(MemoryError):
        scheduler.end(leaving, Finish.ABORT)
    scheduler.reset(requests)
    assert {request.finish for request in requests} == {Finish.ERROR}
    assert sorted(scheduler._free_slots) == [1, 2, 3]
    assert scheduler.pages.num_free == scheduler.shapes.num_pages - 1
    assert not scheduler.has_work and not scheduler._forked_samples


@pytest.mark.parametrize("fact, what", [("slot", "slot"), ("row", "row of the last plan")])
def test_a_plan_of_two_rows_in_one_place_is_refused(fact, what):
    """Kernels write a row's slot without a look at the others'."""
    loop = Loop()
    loop.add(make_group(0, 5, 9), make_group(1, 5, 9))
    loop.turn()
    one, other = loop.requests.values()
    setattr(other, fact, getattr(one, fact))
    with pytest.raises(ValueError, match=f"Each row of a plan must have its own {what}"):
        loop.turn()


def test_tables_come_before_the_step_in_which_their_request_enters():
    """Its slot's, once for each entry, forks and what comes back after a preemption included."""
    loop = Loop(vocab_size=50, num_pages=12, max_num_seqs=3, decode_rows=(3,))
    loop.add(make_group(1, 9, 20, n=2, logit_bias={4: 1.0}), make_group(5, 9, 20))
    entered = []
    while loop.scheduler.has_work:
        before = {r: r.generation for r in loop.requests.values()}
        step = loop.schedule()
        new = [r for r in loop.requests.values() if r.generation > before[r] and r.slot]
        plans = [table_layout(50).unpack(plan.packed) for plan in step.plan.before]
        assert all(plan.program == TABLES for plan in step.plan.before)
        assert sorted(int(plan["slot"]) for plan in plans) == sorted(
            r.slot for r in new if r.has_tables
        )
        entered += new
        loop.collect()
    assert loop.scheduler.num_preemptions > 0 and len(entered) > 3


def test_a_request_that_is_taken_out_counts_as_no_preemption():
    """As by an export, for which no pages were short."""
    loop = Loop()
    loop.add(make_group(1, 6, 8))
    loop.turn()
    loop.scheduler.preempt(loop.requests[1])
    loop.run()
    assert loop.scheduler.num_preemptions == 0
