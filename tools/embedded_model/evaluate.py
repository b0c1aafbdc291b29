"""Measures a trained checkpoint on the held-out documents: bits per byte, tokens per verify.

    python -m tools.embedded_model.evaluate CORPUS_DIR OUT_DIR

Reads OUT_DIR/model.safetensors; writes OUT_DIR/evaluation.json, and OUT_DIR/greedy.npz for
`check_transformers`.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer

from tools.embedded_model import decode, model, storage
from tools.embedded_model.corpus import END_OF_TEXT
from tools.embedded_model.layers import ModelConfig, Params

CONTEXT = 1024
BATCH = 16
NUM_PROMPTS = 50
PROMPT_TOKENS = 96
NEW_TOKENS = 64
NUM_DRAFTS = 3
ROW_TOKENS = 192  # prompt, new tokens, and room for the last drafts; a multiple of the chunk
TEMPERATURES = (0.0, 0.8)


@functools.partial(jax.jit, static_argnames=("config",))
def token_losses(
    params: Params, rows: Int[Array, "B T+1"], config: ModelConfig
) -> Float[Array, "B T"]:
    logits = model.logits(params, model.trunk(params, rows[:, :-1], config), config)
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])


def total_nats(params: Params, stream: np.ndarray, config: ModelConfig) -> float:
    """The summed loss of every token of `stream` [N] but the first.

    Windows overlap by half: a token is seen after at least CONTEXT / 2 others, if there are any.
    """
    half = CONTEXT // 2
    starts = range(0, max(len(stream) - 1 - half, 1), half)
    padded = np.pad(stream.astype(np.int32), (0, CONTEXT))
    total = 0.0
    for first in range(0, len(starts), BATCH):
        batch = list(starts[first : first + BATCH])
        rows = np.stack([padded[start : start + CONTEXT + 1] for start in batch])
        losses = np.asarray(token_losses(params, jnp.asarray(rows), config), np.float64)
        for start, row in zip(batch, losses, strict=True):
            total += row[half if start else 0 : len(stream) - 1 - start].sum()
    return total


def choose_prompts(stream: np.ndarray, end: int) -> np.ndarray:
    """[NUM_PROMPTS, PROMPT_TOKENS] pieces of documents.

    Evenly spaced over all places where a document has room for the prompt and its answer.
    """
    ends = np.flatnonzero(stream == end)
    places = np.concatenate(
        [
            np.arange(before + 1, after - PROMPT_TOKENS - NEW_TOKENS)
            for before, after in zip(ends, ends[1:], strict=False)
        ]
    )
    chosen = places[(2 * np.arange(NUM_PROMPTS) + 1) * len(places) // (2 * NUM_PROMPTS)]
    return stream[chosen[:, None] + np.arange(PROMPT_TOKENS)].astype(np.int32)


def write_rows(
    params: Params, prompts: np.ndarray, temperature: float, config: ModelConfig
) -> Int[Array, "B T"]:
    rows = jnp.pad(jnp.asarray(prompts), ((0, 0), (0, ROW_TOKENS - PROMPT_TOKENS)))
    is_given = jnp.broadcast_to(jnp.arange(ROW_TOKENS) < PROMPT_TOKENS, rows.shape)
    return decode.write(
        params, rows, is_given, jnp.full(len(rows), temperature), jax.random.key(0), config
    )


@functools.partial(jax.jit, static_argnames=("config",))
def draft_rows(params: Params, rows: Int[Array, "B T"], config: ModelConfig) -> Int[Array, "B T K"]:
    return model.draft(params, rows, model.trunk(params, rows, config), NUM_DRAFTS, config)


def count_accepted(row: np.ndarray, drafts: np.ndarray, end: int) -> list[tuple[int, int]]:
    """(accepted drafts, emitted tokens) of every verify while NEW_TOKENS are generated.

    `row` [T] is what the trunk writes alone and speculation must reproduce, so a greedy draft of
    `drafts` [T, K] stands iff it equals `row` there, at any temperature. The prompt's pass gives
    the first token.
    """
    limit = PROMPT_TOKENS + NEW_TOKENS
    stops = np.flatnonzero(row[PROMPT_TOKENS:limit] == end)
    limit = PROMPT_TOKENS + int(stops[0]) + 1 if len(stops) else limit
    known, verifies = PROMPT_TOKENS + 1, []
    while known < limit:
        matches = drafts[known - 2] == row[known : known + NUM_DRAFTS]
        accepted = int(np.cumprod(matches).sum())
        verifies.append((accepted, min(accepted + 1, limit - known)))
        known += accepted + 1
    return verifies


def measure_acceptance(params: Params, rows: Array, end: int, config: ModelConfig) -> dict:
    """Tokens per verify; the share of drafts accepted at each depth where the one before was."""
    drafts = np.asarray(draft_rows(params, rows, config))
    verifies = [
        verify
        for row, row_drafts in zip(np.asarray(rows), drafts, strict=True)
        for verify in count_accepted(row, row_drafts, end)
    ]
    accepted, emitted = np.asarray(verifies).T
    reached = [int((accepted >= depth).sum()) for depth in range(NUM_DRAFTS + 1)]
    return {
        "tokens_per_verify": round(emitted.sum() / len(emitted), 3),
        "acceptance_by_depth": [
            round(reached[depth + 1] / reached[depth], 3) for depth in range(NUM_DRAFTS)
        ],
        "verifies": len(emitted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus_dir", type=pathlib.Path)
    parser.add_argument("out_dir", type=pathlib.Path)
    parser.add_argument("--show", type=int, default=0, help="print this many greedy continuations")
    arguments = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    config = dataclasses.replace(ModelConfig(), compute_dtype=jnp.dtype("float32"))
    params = storage.load_params(arguments.out_dir / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(arguments.corpus_dir / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    stream = np.load(arguments.corpus_dir / "held_out.npy")
    sizes = json.loads((arguments.corpus_dir / "corpus.json").read_text())

    prompts = choose_prompts(stream, end)
    rows = {
        temperature: write_rows(params, prompts, temperature, config)
        for temperature in TEMPERATURES
    }
    acceptance = {
        f"temperature_{key}": measure_acceptance(params, value, end, config)
        for key, value in rows.items()
    }
    print(json.dumps(acceptance), flush=True)
    greedy = np.asarray(rows[0.0])
    np.savez(
        arguments.out_dir / "greedy.npz",
        rows=greedy,
        logits=np.asarray(model.trunk_logits(params, rows[0.0][:4], config)),
    )
    for row in greedy[: arguments.show]:
        prompt, answer = (tokenizer.decode(part) for part in np.split(row, [PROMPT_TOKENS]))
        print(f"{prompt}\033[1m{answer}\033[0m\n{'-' * 80}")

    nats = total_nats(params, stream, config)
    result = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind.upper(),
        "held_out_bits_per_byte": round(nats / np.log(2) / sizes["held_out_bytes"], 4),
        "held_out_nats_per_token": round(nats / (len(stream) - 1), 4),
        "acceptance": acceptance,
    }
    (arguments.out_dir / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
