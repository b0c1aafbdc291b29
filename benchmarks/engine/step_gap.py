"""How well the host hides behind the device: the gap between steps.

    python -m benchmarks.engine.step_gap [--rows 1 8] [--depths 0 1 2 3] [--json FILE]

Steady greedy decoding of the embedded model. Engine time a step, over the time a step of the same
executables takes when the same plans, built beforehand, are enqueued back to back from the same
state; minus 1. A profiler could not show it: it turns a GPU's command buffers off.
"""

import dataclasses
import json
import statistics
import time

import jax
import jax.numpy as jnp

from benchmarks.measure import record
from jaxspec import LLM, SamplingParams

WARM_STEPS, STEPS = 20, 100


def measure(llm: LLM, rows: int) -> dict[str, float]:
    """Milliseconds a step: by the engine, and by its plans enqueued back to back."""
    engine, runner = llm.session.engine, llm._runner
    params = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5 + row] * 32} for row in range(rows)]
    samples = [sample for (sample,) in llm.prepare(prompts, [params] * rows)]
    llm.session.add(samples)
    for _ in range(WARM_STEPS):
        llm.session.step()
    engine.drain()
    start = jax.block_until_ready(jax.tree.map(jnp.copy, runner.state))
    plans, dispatch = [], runner.dispatch

    def note(plan):
        plans.append(plan)
        return dispatch(plan)

    runner.dispatch = note
    before = dict(vars(engine.metrics))
    begin = time.perf_counter()
    while len(plans) < STEPS:
        llm.session.step()
    engine.drain()
    engine_time = time.perf_counter() - begin
    runner.dispatch = dispatch
    after = vars(engine.metrics)
    llm.session.abort(samples)

    runner._state = start
    # On the device beforehand: a transfer would make a deep queue wait for the host's staging.
    plans = [dataclasses.replace(plan, packed=jnp.asarray(plan.packed)) for plan in plans]
    jax.block_until_ready([plan.packed for plan in plans])
    begin = time.perf_counter()
    pending = [runner.dispatch(plan) for plan in plans]
    pending[-1].result()
    back_to_back = time.perf_counter() - begin
    host = sum(after[k] - before[k] for k in ("plan_time", "dispatch_time", "collect_time"))
    return {
        "engine_ms": 1000 * engine_time / len(plans),
        "back_to_back_ms": 1000 * back_to_back / len(plans),
        "host_ms": 1000 * host / len(plans),
    }


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    results = []
    for rows in args.rows:
        for drafts in args.drafts:
            for depth in args.depths:
                llm = LLM(
                    speculative_config={"num_speculative_tokens": drafts} if drafts else None,
                    max_num_seqs=rows,
                    max_in_flight=depth,
                    dtype=args.dtype,
                    decode_buckets=[rows],
                    prefill_buckets=[512],
                    background_compilation=False,
                    enable_prefix_caching=False,  # the same prompts come again and again
                )
                runs = [measure(llm, rows) for _ in range(args.repeats)]
                middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                gaps = [run["engine_ms"] / run["back_to_back_ms"] - 1 for run in runs]
                result = {
                    "rows": rows,
                    "drafts": drafts,
                    "max_in_flight": depth,
                    "dtype": args.dtype,
                    **{key: round(value, 4) for key, value in middle.items()},
                    "gap": round(statistics.median(gaps), 4),
                    "gap_least": round(min(gaps), 4),
                    "gap_most": round(max(gaps), 4),
                }
                results.append(result)
                print(json.dumps(result), flush=True)
    record.write(args.json, {"repeats": args.repeats, "results": results})


if __name__ == "__main__":
    main()
