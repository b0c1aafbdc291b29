"""Pools of steps that replay, for both recurrences, and walks over many steps."""

import jax.numpy as jnp
import numpy as np
from recurrences import at, spoil
from regions import decode_region

from jaxspec.pallas.recurrent.replay import default_window, must_fold, next_ring_length

LAYERS, SLOTS = 2, 5


def nan(dims):
    return np.full(dims, np.nan)


def pools(family, make, shape=None, dtype=jnp.float32, *, width, window=None, slots=SLOTS):
    """States and ring; `make(dims)` gives their elements. `window` None: the default."""
    shape, window = shape or family.small, window or default_window(jnp.dtype(dtype).itemsize)

    def pool(dtype, *dims):
        return jnp.asarray(make((LAYERS, slots, *dims)), dtype)

    states = pool(dtype, 1, *family.state(shape))
    *factors, decays = family.factors(shape)
    factors = [pool(dtype, window + width, *dims) for dims in factors]
    decays = family.sign * abs(pool(jnp.float32, window + width, *decays))
    return states, family.ring(*factors, decays, window)


def kept_by(acceptance, rng):
    """How many of a step's `real` tokens are accepted."""
    return {
        "none": lambda real: 1,
        "all": lambda real: real,
        "random": lambda real: int(rng.integers(1, real + 1)),
    }[acceptance]


def walk(family, run, rng, pools, widths, kept_of, *, shape=None, padded=False, slowed=1.0):
    """Steps of these widths with rows that change places; outputs are the oracle's to 1e-5.

    `kept_of(real)`: how many of a step's `real` tokens are accepted. `padded`: steps may have fewer
    tokens than their width, and the others are NaN. `slowed`: with a small factor the oldest tokens
    of a ring still count. Returns the pools, and how often a row folded.
    """
    states, ring = pools
    slots, folds, like = (1, 3, 4), 0, family.draw(rng, 1, shape=shape)
    states = states.at[1, slots, 0].set(0.0)
    true = {slot: np.zeros(states.shape[3:]) for slot in slots}
    computed, length = dict.fromkeys(slots, 5), dict.fromkeys(slots, 0)
    for width in widths:
        order = rng.permutation(slots)
        query_len = rng.integers(0, width + 1, size=3) if padded else np.full(3, width)
        tokens = family.slowed(family.draw(rng, 3, width, shape=shape, like=like), slowed)
        for row, real in enumerate(query_len):
            spoil(tokens, np.s_[row, real:])
        rows = decode_region(
            order,
            query_len,
            num_computed=[computed[slot] for slot in order],
            ring_length=[length[slot] for slot in order],
        )
        out, states, ring = run(tokens, states, ring, 1, rows)
        for row, slot in enumerate(order):
            if not (real := query_len[row]):
                continue
            expected, after = family.oracle(true[slot], *at(tokens, np.s_[row, :real]))
            np.testing.assert_allclose(out[row, :real], expected, atol=1e-5)
            kept = kept_of(real)
            folds += bool(must_fold(length[slot], width, ring.window))
            length[slot] = int(next_ring_length(length[slot], kept, width, ring.window))
            true[slot], computed[slot] = after[kept - 1], computed[slot] + kept
    return states, ring, folds


def assert_rounding_does_not_add_up(family, shape, outs, tokens, kept, error):
    """The outputs of a row's steps, from no state, against float64.

    `tokens`: those of each step, `[width, ...]`, of which the first `kept` are accepted. The
    relative error is below `error` in each quarter, and hardly more in the last than in the first.
    """
    exact, wrong, right = np.zeros(family.state(shape)), [], []
    for out, step, accepted in zip(outs, tokens, kept, strict=True):
        expected, after = family.oracle(exact, *step)
        wrong.append(np.linalg.norm(out - expected))
        right.append(np.linalg.norm(expected))
        exact = after[accepted - 1]
    quarters = [np.sqrt(np.mean(np.square(x))) for x in np.array_split(wrong, 4)]
    assert max(quarters) < error * np.sqrt(np.mean(np.square(right)))
    assert quarters[-1] < 1.5 * quarters[0]
