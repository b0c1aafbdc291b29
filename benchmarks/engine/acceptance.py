"""Tokens that a step gives on held-out prompts, embedded model, by the method that drafts.

    python -m benchmarks.engine.acceptance [--methods mtp ngram] [--json FILE]

50 prompts of 96 tokens that the model was not trained on, 64 tokens each. A step that had no drafts
gives one token. Nothing is timed, so a busy machine gives the same figures.
"""

import json
from typing import Any

from benchmarks.measure import record
from jaxspec import LLM, RequestMetrics, SamplingParams
from jaxspec.api.loading import EMBEDDED_MODEL

_DRAWN = {"method": "mtp", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
# What is drafted with. Methods that need another checkpoint are missing: none fits this model.
WAYS: tuple[dict[str, Any], ...] = (
    {"method": "mtp", "num_speculative_tokens": 1},
    {"method": "mtp", "num_speculative_tokens": 3},
    {"method": "mtp", "num_speculative_tokens": 3, "draft_head_dtype": "float8_e4m3fn"},
    _DRAWN,
    _DRAWN | {"rejection_sample_method": "block"},
    {"method": "ngram", "num_speculative_tokens": 4},
    {"method": "suffix", "num_speculative_tokens": 8},
)
TEMPERATURES = 0.0, 0.8


def figures(outputs: list[RequestMetrics]) -> dict[str, Any]:
    """Return the acceptance of drafts; the first token of a request is no decode step."""
    total = RequestMetrics.total(outputs)
    count = total.num_tokens - len(outputs)
    steps = count - total.num_accepted_tokens
    return {
        "tokens_per_step": round(count / steps, 3),
        "share_of_steps_with_drafts": round(total.num_drafts / steps, 3),
        "tokens_per_verify": round(total.mean_acceptance_length, 3),
        "acceptance_by_position": [
            round(n / total.num_drafts, 3) for n in total.accepted_per_position
        ],
    }


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--methods", nargs="+", help="default: all that need no other checkpoint")
    args = parser.parse_args()
    held_out = json.loads((EMBEDDED_MODEL / "held_out_prompts.json").read_text())["prompts"]
    prompts = [{"prompt_token_ids": prompt} for prompt in held_out]
    results = []
    for way in WAYS:
        if args.methods and way["method"] not in args.methods:
            continue
        for temperature in TEMPERATURES:
            # An engine of its own for each: what it has written helps some methods.
            llm = LLM(speculative_config=way, decode_buckets=[8], background_compilation=False)
            params = SamplingParams(temperature=temperature, max_tokens=64, ignore_eos=True, seed=0)
            outputs = llm.generate(prompts, params)
            given = figures([output.metrics for output in outputs])
            results.append({**way, "temperature": temperature, **given})
            print(json.dumps(results[-1]), flush=True)
            llm.close()
    record.write(args.json, {"prompts": len(prompts), "results": results})


if __name__ == "__main__":
    main()
