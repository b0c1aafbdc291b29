"""Mailboxes: places of messages, and exchanges in any order in which devices may run."""

import itertools
import random

import numpy as np
import pytest

from jaxspec.pallas.gpu import peers
from jaxspec.pallas.gpu.device import THREADS
from jaxspec.pallas.norm import mailbox
from jaxspec.pallas.norm.mailbox import HEADER, Mailbox
from jaxspec.parallel import ALONE, Group

LINE = 16  # bytes


@pytest.mark.parametrize("features", [512, 640])
def test_no_two_messages_share_a_place(features):
    """A row has a place for each feature as a word, with its number beside it, and whole lines."""
    box = Mailbox(3, features)
    lines = box.bytes_per_row // (LINE * THREADS)
    assert 0 <= 2 * lines * THREADS - features < 2 * THREADS
    places = {
        HEADER
        + sender * box.bytes_per_sender
        + odd * box.bytes_per_exchange
        + row * box.bytes_per_row
        + (line * THREADS + thread) * LINE
        for sender, odd, row, line, thread in itertools.product(
            range(3), range(2), range(box.rows), range(lines), range(THREADS)
        )
    }
    assert len(places) == 3 * 2 * box.rows * lines * THREADS
    assert min(places) == HEADER
    assert max(places) + LINE == box.num_bytes == box.like().box.size * 4


@pytest.mark.devices
def test_addresses_are_those_of_the_devices_mailboxes():
    """Each device's messages to another are where that one reads those of this rank."""
    group, box = Group(2), Mailbox(2, 512)
    mailbox_args = box.allocate(group)
    assert [leaf.shape for leaf in (mailbox_args.addresses, mailbox_args.box)] == [
        leaf.shape for leaf in (group.like(box.like()).addresses, group.like(box.like()).box)
    ]
    table = np.asarray(mailbox_args.addresses).view(np.uint64).reshape(2, 3).astype(int)
    own = table[:, 2]
    starts = [shard.data.unsafe_buffer_pointer() for shard in mailbox_args.box.addressable_shards]
    assert own.tolist() == starts
    for rank, to in itertools.product(range(2), range(2)):
        assert table[rank, to] == own[to] + HEADER + rank * box.bytes_per_sender
    assert not np.asarray(mailbox_args.box).any()


@pytest.mark.parametrize("off", ["switch", "nodes", "features", "kernels", "peers", "alone"])
def test_a_group_without_mailboxes(monkeypatch, off):
    monkeypatch.setattr(mailbox, "ENABLED", off != "switch")
    monkeypatch.setattr(mailbox.dispatch, "has_kernels", lambda: off != "kernels")
    monkeypatch.setattr(peers, "all_reach_each_other", lambda devices: off != "peers")
    monkeypatch.setattr(Group, "devices", (None, None))
    group = ALONE if off == "alone" else Group(2, nodes=2 if off == "nodes" else 1)
    assert Mailbox.of(group, 2688 if off == "features" else 4096) is None


def test_a_group_with_mailboxes(monkeypatch):
    monkeypatch.setattr(mailbox.dispatch, "has_kernels", lambda: True)
    monkeypatch.setattr(peers, "all_reach_each_other", lambda devices: True)
    monkeypatch.setattr(Group, "devices", (None, None))
    assert Mailbox.of(Group(2), 4096) == Mailbox(2, 4096)


class Device:
    """What the kernel does for one row, an access of memory at a time; messages are one word."""

    def __init__(self, rank, boxes, buffers):
        self.rank, self.boxes, self.buffers = rank, boxes, buffers
        self.count, self.sums = 0, []

    def exchanges(self, number):
        for _ in range(number):
            exchange = self.count + 1
            place = exchange % self.buffers
            for box in self.boxes:
                box[self.rank][place] = (10**self.rank * exchange, exchange)
                yield
            total = 0
            for sender in range(len(self.boxes)):
                while self.boxes[self.rank][sender][place][1] != exchange:
                    yield
                yield  # another device may write between the reads of two messages
                total += self.boxes[self.rank][sender][place][0]
            self.sums.append(total)
            self.count = exchange


def sums_of(seed, buffers, devices=3, number=20, patience=20_000):
    """Sums of each device if they run in a random order, in which some are far behind at times."""
    rng = random.Random(seed)
    boxes = [[[(0, 0)] * buffers for _ in range(devices)] for _ in range(devices)]
    each = [Device(rank, boxes, buffers) for rank in range(devices)]
    running = {rank: device.exchanges(number) for rank, device in enumerate(each)}
    for _ in range(patience):
        if not running:
            break
        rank = rng.choice(list(running))
        for _ in range(rng.choice((1, 1, 50))):
            if next(running[rank], "end") == "end":
                del running[rank]
                break
    return [device.sums for device in each]


@pytest.mark.parametrize("seed", range(20))
def test_no_exchange_overtakes_another(seed):
    expected = [111 * exchange for exchange in range(1, 21)]
    assert sums_of(seed, buffers=2) == [expected] * 3


def test_one_place_per_sender_would_be_overtaken():
    """The simulation sees the fault for which there are two."""
    expected = [111 * exchange for exchange in range(1, 21)]
    assert any(sums_of(seed, buffers=1) != [expected] * 3 for seed in range(20))
