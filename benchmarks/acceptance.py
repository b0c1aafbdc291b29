"""Tokens a verify step gives on held-out prompts, embedded model, its own draft head.

python benchmarks/acceptance.py [--json FILE]
"""

import argparse
import json
import time
from pathlib import Path

import jax

from jaxspec import LLM, RequestMetrics, SamplingParams
from jaxspec.llm import EMBEDDED_MODEL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--json", type=Path)
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
    if args.json:
        about = {"prompts": len(prompts), "jax": jax.__version__, "date": time.strftime("%F")}
        args.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
