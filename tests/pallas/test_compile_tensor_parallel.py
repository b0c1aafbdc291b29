"""A step of several GPUs compiles for machines that are not there: all state in place."""

import re

import jax
import jax.numpy as jnp
import pytest
from blueprints import LAYERS, ROWS, blueprint_of
from jax.sharding import NamedSharding, PartitionSpec
from sm90 import H200, nothing_kept_on_disk

from jaxspec import device, parallel
from jaxspec.pallas.gpu import peers
from jaxspec.pallas.norm import mailbox
from jaxspec.parallel import Group
from jaxspec.plan.plan import Program, plan_layout
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.runner.output import DeviceOutput
from jaxspec.runner.programs import program_cache
from jaxspec.runner.step import new_step


@pytest.fixture
def group(h200, monkeypatch):
    """Two H200s that are not there; one layer of attention after three of Gated DeltaNet."""
    from jax.experimental import topologies

    there = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x2", target_config=H200
    ).devices
    monkeypatch.setattr(device, "default_device", lambda: there[0])
    monkeypatch.setattr(Group, "devices", tuple(there))
    return Group(2)


@pytest.mark.mosaic
@pytest.mark.parametrize("has_mailboxes", [True, False])
def test_a_step_of_the_9b_on_two_gpus(group, tmp_path, monkeypatch, has_mailboxes):
    """Two sums over the devices a layer; the donated state is written in place.

    The program is one that was kept: exported, and read again.
    """
    monkeypatch.setattr(mailbox, "ENABLED", has_mailboxes)
    monkeypatch.setattr(peers, "all_reach_each_other", lambda devices: True)
    blueprint = blueprint_of(tmp_path, "qwen3.5-9b", group=group)
    program = Program(ROWS, 0, GREEDY)

    def placed(leaf, *axes):
        where = NamedSharding(group.mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    given = group.like((blueprint.weights, blueprint.memory_usage.step_args))
    state = group.like(blueprint.state.of(program))
    size = plan_layout(program, blueprint.config.shapes).size
    plan = placed(jax.ShapeDtypeStruct((size,), jnp.int32))
    shared = jax.tree.map(lambda leaf: placed(leaf, parallel.AXIS), (*given, state))
    step, args = new_step(blueprint.config, program), (*shared, plan)
    results = jax.tree.structure((state, DeviceOutput.structure(GREEDY)))
    kept = program_cache.traced(step, args, "cuda")
    options = {"donate_argnums": 2}
    lowered = program_cache._jitted(kept, step, args, results, options).lower(*args)
    with nothing_kept_on_disk():
        compiled = lowered.compile()
    text = compiled.as_text()
    all_reduces, kernels = r" all-reduce(?:-start)?\(", r"custom-call\(.*reduce_add_norm"
    counts = [len(re.findall(each, text)) for each in (kernels, all_reduces)]
    assert counts == ([2 * LAYERS, 0] if has_mailboxes else [0, 2 * LAYERS])
    assert len(re.findall(r" all-gather(?:-start)?\(", text)) == 1
    if blueprint.config.mailbox is not None:
        words = blueprint.config.mailbox.num_bytes // 4
        assert f"s32[{words}]" in text  # an argument, which kernels find where it is: no copy
        assert not re.findall(rf"s32\[{words}\]\S* (?!parameter)\S+\(", text)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) // 2
    assert compiled.memory_analysis().alias_size_in_bytes == held
