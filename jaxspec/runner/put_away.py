"""PutAway: weights in host memory, while their devices are used otherwise."""

from typing import NamedTuple

import jax
from jax.sharding import Sharding

Leaves = tuple[jax.Array, ...]


class PutAway(NamedTuple):
    """Copies of several tuples of leaves in pinned host memory.

    A leaf that is in several places is copied once, and is one array again afterwards.
    """

    copies: dict[int, jax.Array]  # by id of the leaf
    shardings: dict[int, Sharding]  # of the leaves on their devices
    places: tuple[tuple[int, ...], ...]  # the id of each leaf of each tuple

    @staticmethod
    def of(*tuples: Leaves) -> "PutAway":
        """Copy leaves, and wait for the copies."""
        leaves = {id(leaf): leaf for each in tuples for leaf in each}
        copies = {
            number: jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"))
            for number, leaf in leaves.items()
        }
        shardings = {number: leaf.sharding for number, leaf in leaves.items()}
        places = tuple(tuple(map(id, each)) for each in tuples)
        return PutAway(jax.block_until_ready(copies), shardings, places)

    def on_devices(self) -> list[Leaves]:
        """Return copies of the tuples on the devices of the leaves, and wait for them."""
        there = jax.block_until_ready(jax.device_put(self.copies, self.shardings))
        return [tuple(there[number] for number in numbers) for numbers in self.places]
