"""The engine's metrics under vLLM's names."""

from fake_device import make_buckets, make_group

from jaxspec.engine.engine import Engine
from jaxspec.engine.metrics import Counter, Gauge, Vector, metrics_of
from jaxspec.plan.step_shapes import SchedulerLimits
from jaxspec.scheduler.scheduler import Scheduler


def test_each_figure_is_the_engine_s_own():
    scheduler = Scheduler(make_buckets(num_drafts=2), SchedulerLimits())
    engine = Engine(scheduler, runner=None)
    group = make_group(1, 6, 30)
    scheduler.add(group)
    scheduler.prefixes.counts.of_request(9, num_cached=4, num_matched=6)
    engine.metrics.num_tokens, scheduler.num_preemptions = 7, 2
    engine.acceptance.record([3, 2], [2, 1])
    found = {metric.name.removeprefix("vllm:"): metric for metric in metrics_of(engine, "a")}
    assert all(m.labels == {"model_name": "a", "engine": "0"} for m in found.values())
    values = {n: m.value for n, m in found.items() if isinstance(m, Counter | Gauge)}
    assert values == {
        "num_requests_running": 0,
        "num_requests_waiting": len(group),
        "kv_cache_usage_perc": 0.0,
        "num_preemptions": 2,
        "prefix_cache_queries": 9,
        "prefix_cache_hits": 4,
        "generation_tokens": 7,
        "spec_decode_num_drafts": 3,
        "spec_decode_num_draft_tokens": 5,
        "spec_decode_num_accepted_tokens": 3,
    }
    per_position = found["spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(per_position, Vector) and per_position.values == [2, 1]
    pages = scheduler.pages.num_free
    scheduler.pages.allocate(3)
    used = {metric.name: metric for metric in metrics_of(engine, "a")}["vllm:kv_cache_usage_perc"]
    assert used.value == 3 / pages
