"""Weights that are held as published, beside dequantised ones."""

import jax.numpy as jnp
import numpy as np

from jaxspec import LLM, SamplingParams
from jaxspec.models.layers.weight_matrix import WeightStack
from jaxspec.weight import Columns, Dense, DenseExperts

FLOAT32 = jnp.dtype("float32")
WIDE = "qwen3_5_moe_wide"  # its matrices begin at multiples of 64
PROMPTS = [[3, 14, 15, 92, 65], [35, 8, 97, 93, 23, 84, 62]]


def weight_of(matrix):
    return matrix.operand if isinstance(matrix, WeightStack) else matrix.columns


def dense(weight):
    if isinstance(weight, Columns):
        return np.concatenate([dense(part) for part in weight.parts], axis=1)
    is_dense = isinstance(weight, Dense | DenseExperts)
    return np.asarray((weight if is_dense else weight.dense()).array)


def assert_equal(matrix, other, **tolerance):
    """Two matrices or stacks are equal, and what pads the first is zeros."""
    found, expected = dense(weight_of(matrix)), dense(weight_of(other))
    padding = [(0, a - b) for a, b in zip(found.shape, expected.shape, strict=True)]
    np.testing.assert_allclose(found, np.pad(expected, padding), **tolerance)


def ids(folder, drafts=0, **options):
    speculation = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None
    sizes = {"max_num_seqs": 4, "max_model_len": 64, "decode_buckets": [4]}
    sizes |= {"prefill_buckets": [64]}
    with LLM(folder, dtype="float32", speculative_config=speculation, **sizes, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params)
    return [output.outputs[0].token_ids for output in outputs]
