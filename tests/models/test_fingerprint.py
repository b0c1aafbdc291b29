"""Fingerprints: one for a model and its weights, whatever the engine; another for any other."""

import jax.numpy as jnp
import pytest

from jaxspec.models.fingerprint import fingerprint

LEAVES = (jnp.arange(2000, dtype=jnp.float32).reshape(50, 40), jnp.ones(3, jnp.bfloat16))


def test_equal_models_have_equal_fingerprints():
    copies = tuple(leaf + 0 for leaf in LEAVES)
    assert fingerprint("config", LEAVES) == fingerprint("config", copies)
    assert len(fingerprint("config", ())) == 64


@pytest.mark.parametrize(
    "other",
    [
        ("other", LEAVES),
        ("config", LEAVES[::-1]),
        ("config", LEAVES[:1]),
        ("config", (LEAVES[0] * 1.001, LEAVES[1])),
        ("config", (LEAVES[0], LEAVES[1].at[2].set(2))),
        ("config", (LEAVES[0].reshape(40, 50), LEAVES[1])),
        ("config", (LEAVES[0], LEAVES[1].astype(jnp.float16))),
        ("config", (LEAVES[0].astype(jnp.bfloat16), LEAVES[1])),
    ],
    ids=["config", "order", "fewer", "values", "one value", "shape", "dtype", "precision"],
)
def test_any_other_model_has_another(other):
    assert fingerprint(*other) != fingerprint("config", LEAVES)
