"""`python node_program.py RANK JSON`: a node of a group; node 0 prints what it generates.

The JSON has `model`, `options`, `devices` (CPU devices of a node), `modules` (a folder to import
from, if there is one), and `calls`: keyword arguments
of `SamplingParams` for each prompt. Node 0 prints `begin` before the last call, and for each call a
line of JSON, or `error` and the error.
"""

import json
import sys

import jax

jax.config.update("jax_default_matmul_precision", "highest")

import jaxspec  # noqa: E402
from jaxspec import SamplingParams  # noqa: E402


def main(rank: int, given: dict) -> None:
    jax.config.update("jax_num_cpu_devices", given["devices"])
    sys.path[:0] = given.get("modules", [])
    if rank:
        jaxspec.follow(given["model"], node_rank=rank, **given["options"])
        return
    llm = jaxspec.LLM(given["model"], **given["options"])
    for number, call in enumerate(given["calls"], 1):
        if number == len(given["calls"]):
            print("begin", flush=True)
        try:
            outputs = llm.generate(
                [prompt for prompt, _ in call], [SamplingParams(**params) for _, params in call]
            )
        except RuntimeError as error:
            print("error", error, flush=True)
            return
        print(json.dumps(answer_of(llm, outputs)), flush=True)
    llm.close()


def answer_of(llm, outputs) -> dict:
    metrics = llm.metrics()
    return {
        "tokens": [list(each.outputs[0].token_ids) for each in outputs],
        "cached": sum(each.num_cached_tokens or 0 for each in outputs),
        "preemptions": metrics["num_preemptions"],
        "rounds": metrics["num_rounds"],
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
