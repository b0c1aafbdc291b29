"""Logits processors whose tokens are known: each token is `step` above the one before it."""

import itertools
from typing import Any

import jax.numpy as jnp

from jaxspec import HostLogitsProcessor, LogitsProcessor

IDS = 128  # after the last of them comes the first one


class Step(LogitsProcessor):
    """Masks all ids but the next one, on the device."""

    params = ("step",)
    window = 1

    def __call__(self, logits: Any, prefix: Any, params: dict[str, Any]) -> Any:
        following = (prefix.ids[-1] + params["step"].astype(jnp.int32)) % IDS
        return jnp.where(jnp.arange(logits.shape[0]) == following, logits, -jnp.inf)


class HostStep(HostLogitsProcessor):
    """As `Step`, on the host."""

    params = ("host_step",)

    def __call__(self, prompt_ids: Any, output_ids: Any, args: Any) -> list[int]:
        last = (output_ids or prompt_ids)[-1]
        return [(last + args["host_step"]) % IDS]


def follows(prompt_ids: list[int], output_ids: list[int], extra_args: dict[str, Any]) -> bool:
    """Return whether the output has the tokens of either processor."""
    (step,) = extra_args.values()
    ids = [prompt_ids[-1], *output_ids]
    return all((last + step) % IDS == token for last, token in itertools.pairwise(ids))
