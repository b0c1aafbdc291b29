"""Speed of decoding in which some requests have a form, beside the same requests without one.

    python -m benchmarks.engine.structured_outputs [--shape qwen3.5-9b] [--rows 64] [--json FILE]

A batch of random prompts, sampled as Qwen3.5's defaults ask, by a model with random weights and its
own draft head: its drafts are nearly never accepted, so a step gives a token per request. The
vocabulary has all bytes, words, and words beside the signs of JSON. Each case is a form, followed
on the device or masked by the host, for a fifth of the requests or for all. `bias` has no form and
runs the same program as forms do. A step's time is that of the tokens after the first one, over the
steps; a request that the host masks is in every second one.
"""

import argparse
import dataclasses
import functools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from benchmarks.engine import dummy_llm
from benchmarks.engine.dummy_llm import Figures
from benchmarks.measure import record
from benchmarks.measure.words import word
from benchmarks.published import MODELS
from jaxspec import LLM, RequestOutput, SamplingParams

SAMPLING = {"temperature": 0.7, "top_k": 20, "top_p": 0.95}
PROMPT, TOKENS, SHARE = 64, 192, 0.2
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}
KINDS: dict[str, dict[str, Any]] = {  # parameters of the requests of a case
    "free": {},
    "bias": {"logit_bias": {5: 0.0, 6: 0.1}},
    "regex (device)": {"structured_outputs": {"regex": "( [a-z]{1,8})+ZZZ"}},
    "recursive schema (host)": {"structured_outputs": {"json": TREE}},
    "any object (host)": {"structured_outputs": {"json_object": True}},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Fields that identify a result."""

    shape: str
    rows: int
    drafts: int
    kind: str
    constrained: int  # requests of the kind; the others are free


def cases_of(shape: str, rows: int, drafts: int) -> Iterator[Case]:
    for kind, params in KINDS.items():
        counts = [round(SHARE * rows), rows] if "structured_outputs" in params else [rows]
        for count in counts:
            yield Case(shape, rows, drafts, kind, count)


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer of bytes, words, and words with a sign of JSON before or after them."""
    texts = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    for number in range(vocab):
        text = word(number)
        texts += [text, f"Ġ{text}", f'"{text}', f'{text}"', f'{text}",', text.upper()]
    ids = {text: id for id, text in enumerate(list(dict.fromkeys(texts))[:vocab])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [], ignore_merges=True))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def make_llm(folder: Path, args: argparse.Namespace) -> LLM:
    published = MODELS[args.shape]
    config = published.small(4) if args.small else published.config
    published.write(folder, config)
    write_tokenizer(folder, config.get("text_config", config)["vocab_size"])
    return LLM(
        folder,
        load_format="dummy",
        speculative_config={"method": "mtp", "num_speculative_tokens": args.drafts},
        max_num_seqs=args.rows,
        max_model_len=1024,
        decode_buckets=[args.rows],
        prefill_buckets=[512],
        steps_per_dispatch=1,
        enable_prefix_caching=False,
        show_progress=False,
        compilation_cache=args.compilation_cache,
    )


def params_of(case: Case, tokens: int) -> list[SamplingParams]:
    def one(kind: dict[str, Any]) -> SamplingParams:
        ends = "structured_outputs" not in kind
        return SamplingParams(max_tokens=tokens, ignore_eos=ends, **SAMPLING, **kind)

    others = case.rows - case.constrained
    return [one(KINDS[case.kind])] * case.constrained + [one({})] * others


def measure(llm: LLM, case: Case) -> Figures:
    """Return the milliseconds per step, the steps, and the tokens per second of all requests."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, llm.vocab_size, (case.rows, PROMPT)).tolist()
    prompts = [{"prompt_token_ids": row} for row in ids]

    def run(tokens: int) -> tuple[float, int, list[RequestOutput]]:
        steps, start = llm.metrics()["num_steps"], time.perf_counter()
        outputs = llm.generate(prompts, params_of(case, tokens))
        return time.perf_counter() - start, llm.metrics()["num_steps"] - steps, outputs

    run(2)  # compiles the form
    first, last = run(1), run(1 + TOKENS)
    metrics = [output.metrics for output in last[2] if output.metrics.num_tokens > 8]
    rates = [(m.num_tokens - 1) / (m.last_token_time - m.first_token_time) for m in metrics]
    return {
        "ms_per_step": 1000 * (last[0] - first[0]) / (last[1] - first[1]),
        "steps": last[1] - first[1],
        "tokens_per_second": case.rows * float(np.mean(rates)),
    }


def main() -> None:
    options = record.parser(__doc__)
    options.add_argument("--shape", choices=MODELS, default="qwen3.5-9b")
    options.add_argument("--rows", type=int, default=64)
    options.add_argument("--drafts", type=int, default=3)
    options.add_argument("--small", action="store_true", help="a narrow model, for a CPU")
    options.add_argument("--compilation-cache", type=Path, metavar="FOLDER")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        llm, setting_up = dummy_llm.timed(functools.partial(make_llm, Path(folder), args))
        llm.warm_up([params_of(case, 8)[0] for case in cases_of(args.shape, args.rows, 0)])
        for case in cases_of(args.shape, args.rows, args.drafts):
            record.keep(args.json, case, {**measure(llm, case), "load_seconds": setting_up})
        llm.close()


if __name__ == "__main__":
    main()
