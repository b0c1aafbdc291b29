"""reduce_add_norm compiles to sm_90a machine code without spills, and without peers of XLA's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sm90 import H200, nothing_kept_on_disk

from benchmarks.measure.shapes import HIDDEN
from jaxspec import device, parallel
from jaxspec.pallas import dispatch
from jaxspec.pallas.norm import mailbox
from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.mailbox import Mailbox
from jaxspec.pallas.norm.residual import OfDevices
from jaxspec.pallas.norm.rms_norm import Norm

OPTIMIZED = True  # as for a user


def compiled_for(count, monkeypatch, capfd, stream, own, weight, results=lambda *found: found):
    """The program and ptxas' report."""
    from jax.experimental import topologies

    there = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x1x{count}", target_config=H200
    ).devices
    monkeypatch.setattr(device, "default_device", lambda: there[0])
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    box = Mailbox(count, stream.shape[1])

    def step(stream, own, weight, mailbox_args):
        with mailbox.use(box, mailbox_args):
            return results(*add_norm(stream, OfDevices(own), Norm(weight, 1e-6, zero_centred=True)))

    mesh = Mesh(np.array(there), (parallel.AXIS,))
    split = PartitionSpec(parallel.AXIS)
    on_each = jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)

    def stacked(leaf):
        shape = count * leaf.shape[0], *leaf.shape[1:]
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, split))

    args = jax.tree.map(stacked, (stream, own, weight, box.like()))
    with dispatch.choices() as chosen:
        lowered = jax.jit(on_each).lower(*args)
    with nothing_kept_on_disk():
        program = lowered.compile().as_text()
    assert [(op, how) for op, how, _ in chosen] == [("reduce_add_norm", "kernel")]
    return program, capfd.readouterr().out


def check(count, monkeypatch, capfd, *args):
    program, report = compiled_for(count, monkeypatch, capfd, *args)
    assert "for 'sm_90a'" in report
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert "all-reduce" not in program
    assert '"uses_xla_collective_metadata" = true' not in program
    assert "uses_xla_collective_metadata = true" not in program


def array(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


@pytest.mark.mosaic
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("features", [512, 640, 2688, 2944, *sorted(set(HIDDEN.values()))])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tokens_are_summed(h200, monkeypatch, capfd, features, dtype, devices):
    tokens = array(4, features, dtype=dtype)
    check(devices, monkeypatch, capfd, tokens, tokens, array(features, dtype=dtype))


@pytest.mark.mosaic
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("features", [2048, 2688, 5120])
def test_the_most_rows_of_parts_are_summed(h200, monkeypatch, capfd, features, devices):
    rows = Mailbox(devices, features).rows
    parts = array(8, rows, features, dtype=jnp.float32)
    check(devices, monkeypatch, capfd, array(rows, features), parts, array(features))


@pytest.mark.mosaic
def test_an_exchange_is_removed_if_nothing_needs_it(h200, monkeypatch, capfd):
    """So the first of a draft model's passes, of which only the states are used, ends early."""
    tokens, weight = array(4, 512), array(512)
    args = 2, monkeypatch, capfd, tokens, tokens, weight
    needed, _ = compiled_for(*args)
    unneeded, _ = compiled_for(*args, results=lambda *found: jax.tree.map(jnp.zeros_like, found))
    kernel = r"custom-call\(.*reduce_add_norm"
    assert [len(re.findall(kernel, text)) for text in (needed, unneeded)] == [1, 0]
