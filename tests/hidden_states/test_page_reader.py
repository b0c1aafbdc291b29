from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.hidden_states.recorder import PageReader
from jaxspec.parallel import ALONE


def make_runner(page_size, num_pages=40):
    pool = jnp.arange(num_pages * page_size * 2, dtype=jnp.float32)
    pool = pool.reshape(num_pages, page_size, 2)
    shapes, state = SimpleNamespace(page_size=page_size), SimpleNamespace(pools={"it": pool})
    return SimpleNamespace(shapes=shapes, state=state, group=ALONE)


@pytest.mark.parametrize("page_size", [16, 100, 300])  # pages of a copy: 16, 2 and 1
@pytest.mark.parametrize("count", [0, 1, 2, 16, 17, 39])
def test_pages_come_in_their_order(page_size, count):
    runner = make_runner(page_size)
    pages = np.random.default_rng(count).permutation(np.arange(1, 40))[:count].tolist()
    copies = PageReader(runner, "it").read(pages)
    got = np.concatenate([np.zeros((0, page_size, 2)), *copies])
    np.testing.assert_array_equal(got[:count], runner.state.pools["it"][np.array(pages, int)])


def test_a_copy_has_what_earlier_steps_left_and_nothing_of_later_ones():
    runner = make_runner(16)
    reader, pools = PageReader(runner, "it"), runner.state.pools
    step = jax.jit(lambda pool: pool + 1, donate_argnums=0)
    wanted, got = [], []
    for _ in range(20):
        wanted.append(np.array(pools["it"][jnp.array([3, 4])]))
        got.append(reader.read([3, 4])[0])
        pools["it"] = step(pools["it"])
    for copy, want in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(copy[:2], want)
