"""Logits processors whose outputs are known: each token follows from the two before it."""

import dataclasses

import jax.numpy as jnp

from jaxspec import HostLogitsProcessor, LogitsProcessor


def walk(prompt, count, modulus, offset):
    """The tokens of both walks after a prompt."""
    tokens = [-1, -1, *prompt]
    for _ in range(count):
        tokens.append((tokens[-1] + tokens[-2] + offset) % modulus)
    return tokens[len(tokens) - count :]


@dataclasses.dataclass(frozen=True)
class Walk(LogitsProcessor):
    """Adds `strength` to the logit of the sum of the last two tokens."""

    strength: float = jnp.inf
    params: tuple[str, ...] = ("modulus", "offset")
    window = 2

    def __call__(self, logits, prefix, params):
        modulus, offset = (params[name].astype(jnp.int32) for name in self.params)
        # A modulus of 0, as of rows without arguments, has a result, too.
        target = (prefix.ids[0] + prefix.ids[1] + offset) % jnp.maximum(modulus, 1)
        is_target = jnp.arange(logits.shape[0]) == target
        if self.strength == jnp.inf:
            return jnp.where(is_target, logits, -jnp.inf)
        return logits + jnp.where(is_target, self.strength, 0.0)

    def validate(self, args):
        name = self.params[0]
        if args[name] < 1:
            raise ValueError(f"extra_args[{name!r}] must be at least 1, got {args[name]}.")


@dataclasses.dataclass(frozen=True)
class Late(LogitsProcessor):
    """Subtracts `late` from the logit of token 7 once there are that many tokens of output."""

    params = ("late",)

    def __call__(self, logits, prefix, params):
        num_output = prefix.length - prefix.prompt_length
        is_late = num_output.astype(jnp.float32) >= params["late"]
        return logits.at[7].add(jnp.where(is_late, -100.0, 100.0))


class HostWalk(HostLogitsProcessor):
    """As `Walk`, on the host."""

    params = "host_modulus", "host_offset"

    def __call__(self, prompt_ids, output_ids, args):
        return walk((*prompt_ids, *output_ids), 1, *(args[name] for name in self.params))


class Failing(HostLogitsProcessor):
    """Fails after some tokens, or returns what is no mask."""

    params = ("fails_after",)

    def __call__(self, prompt_ids, output_ids, args):
        if len(output_ids) < args["fails_after"]:
            return None
        raise KeyError("of the user")


SOFT = Walk(4.0, ("soft_modulus", "soft_offset"))
ALL = Walk(), SOFT, Late(), HostWalk(), Failing()
