"""The training recipe in numbers, and the rows both training phases draw."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """Settings of a training run; the defaults made the bundled model."""

    seed: int = 0
    batch: int = 64
    length: int = 1024

    steps: int = 5000
    learning_rate: float = 3e-3
    final_learning_rate: float = 3e-5
    warmup_share: float = 0.02  # of the steps of each phase
    weight_decay: float = 0.1
    dropout: float = 0.1
    depth_weights: tuple[float, ...] = (0.3, 0.15, 0.075)  # the head's losses at depths 1, 2, 3

    distil_steps: int = 1200
    distil_learning_rate: float = 2e-3
    distil_depth_weights: tuple[float, ...] = (1.0, 0.7, 0.5)
    sample_rows: int = 2048  # rows the trunk writes itself, half of them greedily
    sample_temperature: float = 0.8
    sample_given: int = 96  # of every `sample_period` tokens, how many are real text
    sample_period: int = 256


def random_rows(
    data: Int[Array, " N"], key: Array, batch: int, length: int
) -> Int[Array, "batch length"]:
    """Windows of the token stream from random places; they may span documents."""
    starts = jax.random.randint(key, (batch, 1), 0, data.shape[0] - length + 1)
    return data[starts + jnp.arange(length)].astype(jnp.int32)
