"""Mailbox: memory of each device into which the devices of its group write (`reduce_add_norm`).

A group's devices exchange rows of features through memory that is allocated once per engine and
never moves. Programs take the addresses of all mailboxes as an array. They also take the device's
own mailbox, which kernels do not access as an operand: JAX frees it only when the programs that
have it are complete, and then all messages to it have been read. XLA does not order the accesses,
so that nothing but the kernels themselves takes time, on host and device.

A mailbox of a group of n devices has

    counts     the number of exchanges so far of each row, `[MAX_ROWS]` int32
    messages   `[n senders, 2, rows, features, 2]` int32, for an even and an odd exchange

The messages of a sender are words of its data, each with the number of the exchange beside it. Both
are written as one access of 8 bytes, so a reader that finds the number has the word, too: no fence
and no flag is needed, and no address of a peer is read.

No exchange overtakes another. A device writes a row's messages for exchange e over those for
exchange e - 2. It has completed exchange e - 1 of the row by then, for which every other device
sent messages, after it had completed its exchange e - 2: kernels of a device run one after another.
This holds between launches of programs, too, since all devices run the same programs in the same
order, and the counts stay in the mailbox. Exchanges of a program must depend on each other, as
those of a model's layers do: kernels that XLA could run at the same time would count together. No
code enforces this; `tests/laws/test_exchanges.py` checks the programs of all families and drafters.

A kernel spins until the other devices have sent, so the host must be able to launch theirs
meanwhile. A program with a collective of XLA guarantees this: XLA loads its kernels on all devices
before the first launch, and joins the launches. A step has one if devices share the output head,
because it gathers scores; so groups that do not share the head get no mailbox. A `ForwardPass`
has no head, and gets a collective of its own.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Generator

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import peers
from jaxspec.pallas.gpu.device import THREADS
from jaxspec.parallel import Group

ENABLED = True
"""If False, no group has mailboxes, and all-reduces sum its layers' outputs."""

MAX_ROWS = 256
"""Most rows per exchange of two devices; see `Mailbox.rows` for more devices. Messages have twice
the bytes of the rows, so the gain over an all-reduce shrinks with more rows
(`benchmarks/results/tensor_parallel_h200.json`, two H200s)."""

_MAX_FEATURES = 5120  # a thread keeps 40 of each of several arrays in registers

HEADER = 4 * MAX_ROWS  # bytes of the counts
LINE = 16  # bytes that a thread writes or reads at once: two words, each with the number beside it


def can_hold(features: int) -> bool:
    """Return whether rows of `features` can be exchanged: as many of each thread, 4 or more."""
    return features % THREADS == 0 and 4 * THREADS <= features <= _MAX_FEATURES


@dataclasses.dataclass(frozen=True)
class Mailbox:
    """Sizes of the mailbox of each device, and the layout of its bytes."""

    devices: int
    features: int  # the most of a row

    @property
    def rows(self) -> int:
        """Rows that an exchange has at most: a device sends each to all others."""
        return MAX_ROWS // (self.devices - 1) // 8 * 8

    @property
    def bytes_per_row(self) -> int:
        words = self.features // THREADS  # of a thread, at most: one of each feature
        return LINE * THREADS * -(-words // 2)

    @property
    def bytes_per_exchange(self) -> int:
        return self.rows * self.bytes_per_row

    @property
    def bytes_per_sender(self) -> int:
        return 2 * self.bytes_per_exchange

    @property
    def num_bytes(self) -> int:
        return HEADER + self.devices * self.bytes_per_sender

    def like(self) -> "MailboxArgs":
        """Return the shapes and dtypes of a device's `MailboxArgs`."""
        shapes = (self.devices + 1, 2), (self.num_bytes // 4,)
        zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
        return jax.eval_shape(lambda: MailboxArgs(*map(zeros, shapes)))

    @staticmethod
    def of(group: Group, features: int) -> "Mailbox | None":
        """Return the mailboxes for rows of up to `features`, or None if kernels can't use them.

        Devices must be those of one process, in which an address of each means the same, and write
        to each other's memory.
        """
        is_wanted = ENABLED and group.size > 1 and group.nodes == 1 and can_hold(features)
        # Kernels for other multiples of 128 compile, but have not run on GPUs yet.
        is_wanted &= features % (4 * THREADS) == 0
        if not is_wanted or not dispatch.has_kernels():
            return None
        return Mailbox(group.size, features) if peers.all_reach_each_other(group.devices) else None

    def allocate(self, group: Group) -> "MailboxArgs":
        """Allocate the mailboxes of all devices, with counts of 0; return the group's arrays."""
        zeros = np.zeros(self.num_bytes // 4, np.int32)
        boxes = [jax.device_put(zeros, device) for device in group.devices]
        starts = [box.block_until_ready().unsafe_buffer_pointer() for box in boxes]
        addresses = []
        for rank, (device, own) in enumerate(zip(group.devices, starts, strict=True)):
            messages = [start + HEADER + rank * self.bytes_per_sender for start in starts]
            words = np.array([*messages, own], np.uint64).view(np.int32)
            addresses.append(jax.device_put(words.reshape(len(starts) + 1, 2), device))
        return MailboxArgs(group.stacked(addresses), group.stacked(boxes))


@flax.struct.dataclass
class MailboxArgs:
    """Arguments of a program by which a device exchanges rows with the others."""

    addresses: Int[Array, "devices_and_own two"]
    """Low and high words: where its messages to each device are, and its own mailbox."""

    box: Int[Array, " words"]  # its own mailbox


@dataclasses.dataclass(frozen=True)
class Opened:
    """The mailbox of the program that is being traced."""

    mailbox: Mailbox
    args: MailboxArgs


_opened = contextvars.ContextVar[Opened | None]("_opened", default=None)


@contextlib.contextmanager
def use(mailbox: Mailbox, mailbox_args: MailboxArgs) -> Generator[None]:
    """Let the ops that are traced inside the context exchange rows through a mailbox."""
    token = _opened.set(Opened(mailbox, mailbox_args))
    try:
        yield
    finally:
        _opened.reset(token)


def current() -> Opened | None:
    """Return the mailbox of the program that is being traced, if it has one."""
    return _opened.get()
