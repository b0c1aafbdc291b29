"""`reduce_add_norm` without GPUs: the kernel's arithmetic, with XLA's gather for the mailboxes."""

import functools
import operator
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr

from jaxspec import parallel
from jaxspec.pallas.norm import mailbox, reduce_add_norm
from jaxspec.pallas.norm.mailbox import Mailbox

KERNEL = "reduce_add_norm_kernel"


def sums_by_rank(stream, own, norm):
    """The sum in float32, by rank, rounded as the stream; then the addition and the norm."""
    parts = own if own.ndim == 2 else functools.reduce(operator.add, own)
    of_devices = jax.lax.all_gather(parts, parallel.AXIS).astype(jnp.float32)
    new = functools.reduce(operator.add, of_devices).astype(stream.dtype)
    total = (stream.astype(jnp.float32) + new.astype(jnp.float32)).astype(stream.dtype)
    return total, norm(total)


def reduce_add_norm_kernel(stream, own, norm, mailbox_args, *, mailbox):
    assert stream.shape[0] <= mailbox.rows
    del mailbox_args  # an argument of the program alone
    return jax.jit(sums_by_rank)(stream, own, norm)


def run_fused_sums(monkeypatch):
    """Give each group mailboxes for its rows, of any size, and sum through `sums_by_rank`."""
    monkeypatch.setattr(mailbox, "can_hold", lambda features: True)
    monkeypatch.setattr(
        Mailbox,
        "of",
        staticmethod(lambda group, size: Mailbox(group.size, size) if group.size > 1 else None),
    )
    chosen = SimpleNamespace(runs_kernel=lambda op, why, **_: why is None)
    monkeypatch.setattr(reduce_add_norm, "dispatch", chosen)
    module = SimpleNamespace(reduce_add_norm_kernel=reduce_add_norm_kernel)
    monkeypatch.setitem(sys.modules, f"jaxspec.pallas.norm.{KERNEL}", module)


class Chain:
    """The exchanges of a program, each of which must depend on the one before it.

    An exchange that no result of the program needs is none: XLA removes its kernel.

    Loops and branches run their bodies one after another, so an exchange in one needs only that
    the operands of the loop, or the results of the branches, depend on the exchange before.
    """

    def __init__(self):
        self.length = 0
        self.broken = []  # exchanges that don't depend on the one before them

    @staticmethod
    def of(traced: jax.stages.Traced) -> "Chain":
        chain, whole = Chain(), traced.jaxpr.jaxpr
        jaxpr, _ = dce_jaxpr(whole, [True] * len(whole.outvars), instantiate=True)
        chain._add(jaxpr, [0] * len(jaxpr.invars))
        return chain

    def _add(self, jaxpr, given):
        """Add a jaxpr whose arguments depend on these exchanges; return those of its results."""
        newest = dict(zip(jaxpr.invars, given, strict=True))

        def of(variable):
            return 0 if isinstance(variable, Literal) else newest.get(variable, 0)

        for eqn in jaxpr.eqns:
            found = self._results(eqn, list(map(of, eqn.invars)))
            newest.update(zip(eqn.outvars, found, strict=True))
        return list(map(of, jaxpr.outvars))

    def _results(self, eqn, given):
        after, before, inner = max(given, default=0), self.length, list(jaxprs_of(eqn))
        if eqn.params.get("name") == sums_by_rank.__name__:
            self._follow(after)
            return [self.length] * len(eqn.outvars)
        if eqn.primitive.name in ("jit", "pjit", "shard_map"):
            return self._add(*inner, given)
        for body in inner:
            self._add(body, [before] * len(body.invars))
        if self.length > before and after < before:
            self.broken.append(before + 1)
        return [self.length if self.length > before else after] * len(eqn.outvars)

    def _follow(self, after):
        if after < self.length:
            self.broken.append(self.length + 1)
        self.length += 1


def jaxprs_of(eqn):
    """The jaxprs among the parameters of an equation."""
    for leaf in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
        if is_jaxpr(leaf):
            yield getattr(leaf, "jaxpr", leaf)


def is_jaxpr(leaf):
    return isinstance(leaf, Jaxpr | ClosedJaxpr)
