"""Weights of a fake device, and the calls of trainers on its engine, which are the real ones."""

from types import SimpleNamespace

import numpy as np

from jaxspec.api.pausing import Pausing
from jaxspec.api.weight_updates import Layouts
from jaxspec.engine.gate import Gate

NUM_LEAVES = 3
TREE = {"all": np.zeros(1, np.float32)}


class FakeWeights:
    """What a `ModelRunner` has of weights: some leaves, each of which is the number of an update.

    Attributes:
        pass_: Called with the name of each place where a device may fail.
    """

    group = SimpleNamespace(nodes=1)
    weights = drafter_weights = ()

    def __init__(self, pass_):
        """Start with weights on the device."""
        self.pass_, self.leaves, self.on_host = pass_, [0] * NUM_LEAVES, None
        self.num_changes = 0
        self._names: dict[str, int] = {}

    fingerprint = property(lambda self: str(self.leaves))
    has_weights = property(lambda self: bool(self.leaves))
    has_put_away = property(lambda self: self.on_host is not None)

    def put_away(self):
        if self.has_weights:
            self.pass_("put away")
            self.leaves, self.on_host = [], self.leaves

    def drop_weights(self):
        self.leaves, self.on_host = [], None

    def bring_back(self):
        self.pass_("bring back")
        self.leaves, self.on_host = self.on_host, None

    def allocate(self):
        self.pass_("allocate")

    def replace_weights(self, model, drafter):
        for index, value in model(lambda index: None):
            self.num_changes += 1
            self.leaves = [*self.leaves[:index], value, *self.leaves[index + 1 :]]
            self.pass_("replaced")
        assert not list(drafter(lambda index: None))
        self.num_changes += 1

    def check(self, version):
        """A step reads the weights of its version, and all of them."""
        assert self.has_weights and len(set(self.leaves)) == 1, "weights of several updates"
        assert self._names.setdefault(version, self.leaves[0]) == self.leaves[0], "other weights"


class FakeFilling:
    """A tree that fits: each leaf becomes its number."""

    num_bytes = 1

    def __init__(self, number):
        self.number = number

    def values(self, before):
        return ((index, self.number) for index in range(NUM_LEAVES))

    def compile(self, before):
        """Nothing needs a program."""

    def check_there(self, name):
        """All arrays are there."""


class FakeLayout:
    """Takes any tree."""

    def __init__(self):
        self.number = 0

    def fitting(self, name, arrays, keep):
        self.number += 1
        return FakeFilling(self.number)


class OthersGate(Gate):
    """A gate that another thread closes, so that no caller waits for itself; none waits at all."""

    is_closed_here = False

    def wait(self):
        """Go on at once."""


class FakeRollouts(Pausing):
    """Pauses, sleep and updates of a session over a runner with `FakeWeights`."""

    def __init__(self, session, runner):
        self.session, self._runner, self._flight = session, runner, None
        self._layouts = Layouts(FakeLayout())
        self._begin_versions("0")

    def mend(self):
        """All that ends pauses, sleeps and broken updates."""
        self.resume()
        self.wake_up()
        if not self._runner.has_weights or self.session.is_broken:
            self.update_weights(TREE)
        gate = self.session.gate
        assert gate.is_open and not gate.is_refusing and not self.session.is_broken
