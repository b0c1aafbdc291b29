"""Trees of weights: those of a checkpoint folder, and others of the same shapes."""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

SIZES = {
    "dtype": "float32",
    "max_num_seqs": 2,
    "decode_buckets": [2],
    "prefill_buckets": [32],
    "max_model_len": 64,
    "page_size": 4,
    "show_progress": False,
}


@functools.cache
def tensors_of(folder):
    """The tensors of a folder, on the device."""
    files = sorted(Path(folder).glob("model*.safetensors"))
    return {name: jnp.asarray(each) for file in files for name, each in load_file(file).items()}


def changed(tensors, seed=1, share=0.3):
    """Floats become others, of about the same size; integers stay, and copies remain copies."""
    random, found = np.random.default_rng(seed), {}

    def one(tensor):
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            return tensor
        factors = 1 + share * random.standard_normal(tensor.shape)
        values = np.asarray(tensor).astype(np.float32) * factors.astype(np.float32)
        return jnp.asarray(values).astype(tensor.dtype)

    for name, tensor in tensors.items():
        copied = next((other for other in found if is_copy(tensors[other], tensor)), None)
        found[name] = one(tensor) if copied is None else found[copied]
    return found


def is_copy(one, other):
    """Whether both are an embedding or a head; vectors of zeros or ones are alike by chance."""
    return one.shape == other.shape and one.ndim == 2 and bool((one == other).all())


def rolled(tensors, places=7):
    """The same model, but id i is written as id i + places: drafts of a stale head are wrong."""
    ends = ("embed_tokens.weight", "lm_head.weight")
    return {
        name: jnp.roll(each, places, axis=0) if name.endswith(ends) else each
        for name, each in tensors.items()
    }
