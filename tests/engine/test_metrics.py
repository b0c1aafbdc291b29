"""The engine's metrics under vLLM's names."""

from fake_device import make_buckets, make_group

from jaxspec.engine.engine import Engine
from jaxspec.engine.metrics import Counter, EngineSnapshot, Gauge, Vector, metrics_of
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


def test_of_an_engine_that_has_ended_the_counts_remain_in_a_total():
    disk = {"num_files": 2, "num_bytes": 9, "num_read": 3}
    host = {"num_pieces": 4, "num_bytes": 8, "max_bytes": 16, "num_hits": 5, "disk": disk}
    prefixes = {"num_hits": 6, "num_pages": 7, "num_states": 1, "host": host}
    now = {"num_running": 2, "num_waiting": 1, "kv_cache_usage": 0.5, "memory_bytes": {"kv": 64}}
    own = [Gauge("a", {}, 3), Counter("b", {}, 4)]
    alive = EngineSnapshot({**now, "num_tokens": 10, "prefix_cache": prefixes}, own)
    total = EngineSnapshot.total([alive, alive.counts])
    assert total.by_vllm == [Gauge("a", {}, 3), Counter("b", {}, 8)]
    engine = total.engine
    assert engine["num_tokens"] == 20 and {name: engine[name] for name in now} == now
    found = engine["prefix_cache"]
    assert found["num_hits"] == 12 and found["host"]["num_hits"] == 10
    assert found["host"]["disk"] == disk | {"num_read": 6}
    assert (found["num_pages"], found["host"]["num_bytes"], found["host"]["max_bytes"]) == (
        7,
        8,
        16,
    )
    gone = EngineSnapshot.total([alive.counts]).engine
    assert gone.keys() == engine.keys() and not gone["num_running"] and not gone["kv_cache_usage"]
