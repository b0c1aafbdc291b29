"""Cost of the flight recorder, and a replay of its recording, compared bit for bit.

    python -m benchmarks.engine.flights --shape qwen3.5-0.8b [--rows 1 64] [--json FILE]

`LLM.generate` of so many prompts of 512 random ids at once, 256 greedy tokens each, by a model with
random weights and drafts that stand at given rates. Two engines take turns, one of which records;
the milliseconds are of a whole call over 256, the least, the median and the most of `--repeats`.
Then the flight is saved and replayed, each program from the cache of compiled ones.
"""

import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engine import dummy_llm
from benchmarks.engine.dummy_llm import complete
from benchmarks.measure import record
from jaxspec.commands.replay import replay

PROMPT, TOKENS = 512, 256
RECORDERS = ("off", "full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(dummy_llm.Case):
    """Fields that identify a result."""

    rows: int


def measured(case: Case, model: Path, repeats: int) -> dict[str, Any]:
    sizes = {
        "max_num_seqs": case.rows,
        "max_model_len": PROMPT + TOKENS + 32,
        "decode_buckets": [case.rows],
        "prefill_buckets": [PROMPT],
        "max_num_batched_tokens": PROMPT + case.rows * (1 + case.drafts),
    }
    engines = {
        word: dummy_llm.make_llm(case, model, **sizes, flight_recorder=word) for word in RECORDERS
    }
    prompts = dummy_llm.random_prompts(case.shape, case.rows, PROMPT)
    seconds = {word: [] for word in RECORDERS}
    for number in range(repeats + 1):  # the first compiles
        for word in RECORDERS[:: 1 - 2 * (number % 2)]:
            taken = complete(engines[word], prompts, TOKENS).seconds
            seconds[word] += [taken] * (number > 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "flight.npz"
        engines["full"].save_flight(path)
        num_bytes = path.stat().st_size
        for llm in engines.values():
            llm.close()
        start = time.perf_counter()
        result = replay(path)
        replay_seconds = time.perf_counter() - start
    return {
        **{f"ms_{word}": spread(each) for word, each in seconds.items()},
        "dispatches": len(result.flight.steps),
        "bytes_a_dispatch": round(num_bytes / len(result.flight.steps)),
        "replay_seconds": round(replay_seconds, 2),
        "equal": result.is_equal,
    }


def spread(seconds: list[float]) -> list[float]:
    """Return the minimum, median and maximum in milliseconds per token."""
    values = min(seconds), statistics.median(seconds), max(seconds)
    return [round(1000 * value / TOKENS, 3) for value in values]


def main() -> None:
    parser = dummy_llm.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--drafts", type=int, default=3)
    args = parser.parse_args()
    results = []
    with dummy_llm.model_folder(args.shape, args.quantization) as model:
        for rows in args.rows:
            case = Case(**dummy_llm.fields_given(Case, args) | {"rows": rows})
            figures = measured(case, model, args.repeats)
            results.append({**dataclasses.asdict(case), **figures})
            print(json.dumps(results[-1]), flush=True)
    record.write(args.json, {"prompt": PROMPT, "tokens": TOKENS, "results": results})


if __name__ == "__main__":
    main()
