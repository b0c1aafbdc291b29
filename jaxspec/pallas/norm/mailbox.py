"""Mailbox: memory of each device into which the devices of its group write (`reduce_add_norm`).

A group's devices exchange rows of features through memory that is allocated once per engine and
never moves. A program takes the addresses alone, as an array: XLA neither allocates the memory nor
orders the accesses to it, so that nothing but the kernels themselves takes time on host or device.

A mailbox of a group of n devices has

    counts    the number of exchanges so far of each row, `[ROWS]` int32
    letters   `[n senders, 2, ROWS, features, 2]` int32, for an even and an odd exchange

The letters of a sender are words of its data, each with the number of the exchange beside it. Both
are written as one access of 8 bytes, so a reader that finds the number has the word, too: no fence
and no flag is needed, and no address of a peer is read.

No exchange overtakes another. A device writes a row's letters for exchange e in the places of those
for exchange e - 2. It has completed exchange e - 1 of the row by then, for which every other device
sent letters, after it had completed its exchange e - 2: kernels of a device run one after another.
This holds between launches of programs, too, since all devices run the same programs in the same
order, and the counts stay where they are.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Generator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.parallel import Group

ROWS = 64
"""Rows that an exchange has at most. The letters of each further row would take as long as an
all-reduce, which is not sent twice as many bytes."""

HEADER = 4 * ROWS  # bytes of the counts


@dataclasses.dataclass(frozen=True)
class Mailbox:
    """Sizes of the mailbox of each device, and the layout of its bytes."""

    devices: int
    features: int  # the most of a row

    @property
    def bytes_per_row(self) -> int:
        return 8 * self.features

    @property
    def bytes_per_exchange(self) -> int:
        return ROWS * self.bytes_per_row

    @property
    def bytes_per_sender(self) -> int:
        return 2 * self.bytes_per_exchange

    @property
    def num_bytes(self) -> int:
        return HEADER + self.devices * self.bytes_per_sender

    def addresses_like(self) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of `Opened.addresses` on one device."""
        return jax.ShapeDtypeStruct((self.devices + 1, 2), jnp.int32)

    def allocate(self, group: Group) -> "Allocated":
        """Allocate the mailboxes of a group of one process, with all counts 0."""
        zeros = np.zeros(self.num_bytes // 4, np.int32)
        boxes = [jax.device_put(zeros, device) for device in group.devices]
        starts = [box.block_until_ready().unsafe_buffer_pointer() for box in boxes]
        addresses = []
        for rank, (device, own) in enumerate(zip(group.devices, starts, strict=True)):
            letters = [start + HEADER + rank * self.bytes_per_sender for start in starts]
            words = np.array([*letters, own], np.uint64).view(np.int32)
            addresses.append(jax.device_put(words.reshape(len(starts) + 1, 2), device))
        return Allocated(tuple(boxes), group.stacked(addresses))


@dataclasses.dataclass(frozen=True)
class Allocated:
    """Mailboxes of a group, which are freed with this object: programs hold no reference."""

    boxes: tuple[jax.Array, ...]
    addresses: jax.Array  # of the group; `Opened.addresses` of each device


@dataclasses.dataclass(frozen=True)
class Opened:
    """A device's addresses: where its letters to each device are, and its own mailbox."""

    mailbox: Mailbox
    addresses: Int[Array, "devices_and_own two"]  # low and high words


_opened = contextvars.ContextVar[Opened | None]("_opened", default=None)


@contextlib.contextmanager
def use(opened: Opened | None) -> Generator[None]:
    """Let the ops that are traced inside the context exchange rows through a mailbox."""
    token = _opened.set(opened)
    try:
        yield
    finally:
        _opened.reset(token)


def current() -> Opened | None:
    """Return the mailbox of the program that is being traced, if it has one."""
    return _opened.get()
