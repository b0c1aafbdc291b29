"""Tokens a verify step gives on held-out prompts, embedded model, its own draft head.

    python -m benchmarks.engine.acceptance [--drafts 1 3] [--json FILE]

50 prompts of 96 tokens that the model was not trained on, 64 tokens each: 1 + accepted drafts over
verify steps. Nothing is timed, so a busy machine gives the same figures.
"""

import json

from benchmarks.measure import record
from jaxspec import LLM, RequestMetrics, SamplingParams
from jaxspec.loading import EMBEDDED_MODEL


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 3])
    args = parser.parse_args()
    held_out = json.loads((EMBEDDED_MODEL / "held_out_prompts.json").read_text())["prompts"]
    prompts = [{"prompt_token_ids": prompt} for prompt in held_out]
    results = []
    for drafts in args.drafts:
        for method in ("greedy", "probabilistic"):
            llm = LLM(
                speculative_config={
                    "num_speculative_tokens": drafts,
                    "draft_sample_method": method,
                },
                decode_buckets=[8],
            )
            for temperature in (0.0, 0.8):
                params = SamplingParams(
                    temperature=temperature, max_tokens=64, ignore_eos=True, seed=0
                )
                outputs = llm.generate(prompts, params)
                total = RequestMetrics.total([output.metrics for output in outputs])
                results.append(
                    {
                        "num_speculative_tokens": drafts,
                        "draft_sample_method": method,
                        "temperature": temperature,
                        "tokens_per_verify": round(total.mean_acceptance_length, 3),
                        "acceptance_by_position": [
                            round(n / total.num_drafts, 3) for n in total.accepted_per_position
                        ],
                        "num_verifies": total.num_drafts,
                    }
                )
                print(json.dumps(results[-1]), flush=True)
    record.write(args.json, {"prompts": len(prompts), "results": results})


if __name__ == "__main__":
    main()
