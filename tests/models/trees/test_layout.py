"""Trees fill a loaded module as a checkpoint does, bit for bit; what does not fit is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from harness import FIXTURES, SCALED, folder_of
from quantised_folders import FORMATS, write_pair
from shortened import copied_with
from trees import changed, tensors_of

from jaxspec.models import load_model, unread, unread_model_or_head
from jaxspec.models.checkpoint import SafetensorsCheckpoint
from jaxspec.models.safetensors_file import DTYPES, INTEGERS, QUANTISED
from jaxspec.models.trees import layout as layout_module
from jaxspec.models.trees import leaves
from jaxspec.models.trees.checkpoint import own_names
from jaxspec.models.trees.export import exported
from jaxspec.parallel import Group

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
FAMILIES = (
    *("qwen3_5", "qwen3_5_tied", "qwen3_5_moe", "qwen3_5_moe_raw", "qwen3_5_vl", "qwen3_next"),
    *("qwen3", "qwen3_moe", "llama", "lfm2", "falcon_h1", "granitemoehybrid", "mamba2"),
    *("nemotron_h", "nemotron_h_latent", "granite", "qwen2", "gpt_oss", "gemma4", "gemma4_moe"),
    *("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite"),
    *("kimi_linear", "bailing_hybrid", "gemma4_shared"),
)
FP8 = {"quantization": "fp8", "activation_dtype": "float8_e4m3fn"}
"""Matrices are held in FP8 without a kernel, too."""


def leaves_of(model):
    return jax.tree.leaves(nnx.state(model))


def updated(folder, tree, keep=(), **options):
    """The leaves of a model with the weights of a folder after an update, and its layout."""
    dtype = options.pop("dtype", FLOAT32)
    with unread(folder, dtype, **options) as found:
        before = leaves_of(found.read())
        filling = found.layout.fitting("weights", tree, keep)
    for index, value in filling.values(lambda index: before[index]):
        before[index] = value
    return before, found.layout


def check_equal(some, others):
    for one, other in zip(some, others, strict=True):
        assert (one.dtype, one.sharding) == (other.dtype, other.sharding)
        one, other = np.asarray(one), np.asarray(other)
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


def check_update(fixture, dtype=FLOAT32, devices=1, **options):
    """After an update a model has the leaves of one that is loaded from a folder with the tree."""
    folder, group = FIXTURES / fixture, Group(devices)
    tree = changed(tensors_of(folder))
    got, layout = updated(folder, tree, dtype=dtype, group=group, **options)
    with copied_with(folder, tree) as other:
        want = load_model(other, dtype, group=group, **options)
    check_equal(got, leaves_of(want))
    return got, layout


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype, devices", [(FLOAT32, 1), (BFLOAT16, 2), (BFLOAT16, 1)])
@pytest.mark.parametrize("fixture", FAMILIES)
def test_leaves_are_those_of_a_folder_with_the_tree(fixture, dtype, devices):
    got, layout = check_update(fixture, dtype, devices)
    tensors = exported(layout, got)
    assert {name: (each.shape, each.dtype) for name, each in tensors.items()} == {
        name: (each.shape, each.dtype) for name, each in layout.specs().items()
    }
    again, _ = updated(FIXTURES / fixture, tensors, dtype=dtype, group=layout.group)
    for one, other in zip(again, got, strict=True):  # factors are divided out and applied again
        one, other = (np.asarray(each).astype(np.float32) for each in (one, other))
        np.testing.assert_allclose(one, other, rtol=0.01 if dtype == BFLOAT16 else 1e-6)


def test_matrices_that_were_rounded_are_rounded_again():
    got, _ = check_update("qwen3", BFLOAT16, **FP8)
    assert any(each.dtype == jnp.float8_e4m3fn for each in got)


def stored_tensors(folder):
    """The tensors of a folder as they are stored, in any format."""
    found = {}
    with SafetensorsCheckpoint(folder) as checkpoint:
        for name in checkpoint.names:
            stored = checkpoint.stored(name)
            dtype = (DTYPES | INTEGERS | QUANTISED)[stored.dtype]
            found[name] = np.empty(stored.shape, dtype)
            checkpoint.read(name, 0, found[name].reshape(found[name].size))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fixture, name",
    [
        ("qwen3_5_moe_wide", "fp8 blocks of 128"),
        ("qwen3_next", "ct fp8 rows"),
        ("qwen3", "fp8 tensor"),
        ("qwen3", "w4a16"),
    ],
)
def test_quantised_folders_take_tensors_in_their_format(fixture, name, tmp_path, holds):
    old = write_pair(FIXTURES / fixture, tmp_path / "old", FORMATS[name]).quantised
    with copied_with(FIXTURES / fixture, changed(tensors_of(FIXTURES / fixture))) as other:
        pair = write_pair(other, tmp_path / "new", FORMATS[name])
    got, layout = updated(old, stored_tensors(pair.quantised))
    check_equal(got, leaves_of(load_model(pair.quantised, FLOAT32)))
    if any(layout.forms):
        with pytest.raises(ValueError, match="8 or 4 bits"):
            updated(old, stored_tensors(pair.plain))


def test_own_leaves_are_copied():
    folder = FIXTURES / "qwen3_5"
    with unread(folder, FLOAT32) as found:
        state = nnx.state(found.read())
        before = leaves_of(state)
        names = list(found.layout.own_specs)
        doubled = {name: leaf * 2.0 for name, leaf in zip(names, before, strict=True)}
        filling = found.layout.fitting("weights", doubled, ())
        got = dict(filling.values(lambda index: before[index]))
    check_equal([got[index] for index in range(len(before))], [leaf * 2.0 for leaf in before])


def state_of(model):
    return dict(own_names(nnx.state(model)))


@pytest.mark.few(2)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("fixture", ["qwen3_5", "qwen3_5_tied", "qwen3_moe"])
def test_first_weights_may_be_own_leaves(fixture, devices):
    """The model has no draft head if the leaves have none."""
    folder, group = FIXTURES / fixture, Group(devices)
    model = load_model(folder, FLOAT32, group=group)
    own = {name: leaf * 2.0 for name, leaf in state_of(model).items()}
    without = {name: leaf for name, leaf in own.items() if not name.startswith("draft_head")}
    for weights in (own, without):
        with unread(folder, FLOAT32, group=group, weights=weights) as found:
            made = found.read()
        assert state_of(made).keys() == weights.keys()
        check_equal(state_of(made).values(), weights.values())
        assert made.has_draft_head == any(name.startswith("draft_head") for name in weights)


def test_first_leaves_may_have_scales_of_keys_and_values():
    """They are used if the engine's keys and values are in 8 bits, and unexpected otherwise."""
    folder = folder_of(SCALED)
    own = state_of(load_model(folder, FLOAT32, scales_kv=True))
    scales = {name for name in own if name.endswith("kv_scales")}
    with unread(folder, FLOAT32, weights=own, scales_kv=True) as found:
        made = found.read()
    assert made.config.scales_kv and scales
    check_equal(state_of(made).values(), own.values())
    plain = {name: leaf for name, leaf in own.items() if name not in scales}
    with unread(folder, FLOAT32, weights=plain, scales_kv=True) as found:
        assert state_of(found.read()).keys() == plain.keys()
    with (
        pytest.raises(ValueError, match="kv_scales"),
        unread(folder, FLOAT32, weights=own) as found,
    ):
        found.read()


def test_a_draft_head_that_leaves_lack_is_missed(caplog):
    folder = FIXTURES / "qwen3_5"
    own = state_of(load_model(folder, FLOAT32))
    without = {name: leaf for name, leaf in own.items() if not name.startswith("draft_head")}
    for weights, lines in ((own, 0), (without, 1)):
        with unread(folder, FLOAT32, weights=weights):
            assert sum("draft head" in each for each in caplog.messages) == lines


@pytest.mark.few(2)
@pytest.mark.parametrize("option", [None, "dequantise"])
@pytest.mark.parametrize("form", ["ct fp8 rows", "w4a16 rows"])
def test_a_quantised_folder_takes_leaves_where_it_runs_in_16_bits(form, option, tmp_path):
    """Such as those of another engine of the folder; there are no kernels here."""
    folder = write_pair(FIXTURES / "llama", tmp_path, FORMATS[form]).quantised
    own = {name: leaf * 2.0 for name, leaf in state_of(load_model(folder, FLOAT32)).items()}
    with unread(folder, FLOAT32, quantization=option, weights=own) as found:
        made = found.read()
    check_equal(state_of(made).values(), own.values())


def test_a_leaf_too_many_is_named():
    """Such as the adapter of a trainer, in first weights and in an update."""
    folder = FIXTURES / "qwen3"
    own = state_of(load_model(folder, BFLOAT16)) | {"trunk.adapter": np.zeros(3, np.float32)}
    for weights in (own, None):
        with (
            pytest.raises(ValueError, match="leaves of.*adapter is none"),
            unread(folder, BFLOAT16, weights=weights) as found,
        ):
            found.read()
            found.layout.fitting("weights", own, ())


@pytest.mark.parametrize("fixture, options", [("qwen3_5", {"quantization": "fp8"}), ("qwen3", {})])
def test_first_leaves_that_do_not_fit_are_refused(fixture, options):
    own = state_of(load_model(FIXTURES / fixture, BFLOAT16))
    if not options:
        own.popitem()
    with (
        pytest.raises(ValueError, match="leaves of"),
        unread(FIXTURES / fixture, BFLOAT16, weights=own, **options) as found,
    ):
        found.read()


def test_what_the_caller_does_with_arrays_afterwards_changes_no_leaf():
    """On a CPU, arrays of NumPy would be adopted, and leaves of one tensor would be the tensor."""
    folder = FIXTURES / "qwen3"
    tree = {name: np.array(each) for name, each in changed(tensors_of(folder)).items()}
    got, _ = updated(folder, tree)
    want = [np.array(leaf) for leaf in got]
    for array in tree.values():
        array[...] = 0
    check_equal(got, map(jnp.asarray, want))
    tree = {name: jnp.array(each) for name, each in changed(tensors_of(folder)).items()}
    got, _ = updated(folder, tree)
    for array in tree.values():
        array.delete()
    check_equal(got, map(jnp.asarray, want))


def test_parameters_of_missing_tensors_stay():
    """Also the part of a parameter whose other tensors are there."""
    folder = FIXTURES / "qwen3_5"
    tensors = tensors_of(folder)
    some = {name: each for name, each in tensors.items() if not name.startswith("mtp.")}
    del some["model.layers.3.self_attn.k_proj.weight"]
    got, _ = updated(folder, changed(some), keep=["mtp.*", "*.k_proj.weight"])
    whole, _ = updated(folder, {**tensors, **changed(some)})
    check_equal(got, whole)


def without(name):
    return lambda tree: tree.pop(name)


def put(name, value):
    return lambda tree: tree.update({name: value})


NORM = "model.norm.weight"
MISFITS = {
    "missing": (without(NORM), NORM),
    "unexpected": (put("model.layers.9.mlp.up_proj.weight", jnp.ones((2, 2))), "layers.9"),
    "misshaped": (put(NORM, jnp.ones((3,))), NORM),
    "integers": (put(NORM, jnp.ones((64,), jnp.int32)), NORM),
    "doubles": (put(NORM, np.ones((64,), np.float64)), NORM),
    "doubled": (put("model.language_model.norm.weight", jnp.ones((64,))), "norm.weight"),
}


@pytest.mark.parametrize("damage, named", MISFITS.values(), ids=MISFITS)
def test_trees_that_do_not_fit_are_refused_by_name(damage, named):
    tree = dict(tensors_of(FIXTURES / "qwen3_5"))
    damage(tree)
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        updated(FIXTURES / "qwen3_5", tree)


def test_a_part_of_a_matrix_in_fp8_or_one_in_16_bits_for_a_folder_in_fp8_is_refused():
    tree = {"model.layers.0.self_attn.k_proj.weight": jnp.zeros((64, 64), jnp.bfloat16)}
    shapes = tensors_of(FIXTURES / "qwen3")
    tree = {name: shapes[name] for name in tree}
    with pytest.raises(ValueError, match="k_proj"):
        updated(FIXTURES / "qwen3", tree, keep=["*"], dtype=BFLOAT16, **FP8)


def test_a_tied_model_takes_a_head_that_equals_its_embeddings_alone():
    folder = FIXTURES / "qwen3_5_tied"
    tree = changed(tensors_of(folder))
    embeddings = next(name for name in tree if name.endswith("embed_tokens.weight"))
    want, _ = updated(folder, tree)
    got, _ = updated(folder, tree | {"lm_head.weight": tree[embeddings] + 0.0})
    check_equal(got, want)
    with pytest.raises(ValueError, match="lm_head"):
        updated(folder, tree | {"lm_head.weight": tree[embeddings] + 1.0})


def test_arrays_on_the_host_are_compared_there():
    """A device that is full of weights and caches has no memory for two embeddings."""
    names = ["lm_head.weight", "model.embed_tokens.weight"]
    one = np.arange(12, dtype=np.float32).reshape(3, 4)
    rounded = one.astype(jnp.bfloat16)
    others = [(one.copy(), True), (rounded, True), (one + 1, False), (one[:2], False)]
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        for other, want in others:
            arrays = dict(zip(names, (one, other), strict=True))
            published = {name: [name] for name in names}
            assert layout_module.has_equal_head(published, arrays) == want


def test_a_first_tree_with_a_head_that_equals_its_embeddings_makes_a_tied_model():
    """So later trees may lack the head."""
    folder = FIXTURES / "qwen3_5_tied"
    tree = tensors_of(folder)
    embeddings = next(name for name in tree if name.endswith("embed_tokens.weight"))
    for factor, is_untied in ((1, False), (2, True)):
        both = tree | {"lm_head.weight": tree[embeddings] * factor}
        with unread(folder, FLOAT32, weights=both) as found:
            assert ("lm_head.weight" in found.layout.specs()) == is_untied
            check_equal(leaves_of(found.read()), updated(folder, both, weights=both)[0])


def test_a_first_tree_without_the_draft_head_is_noted(caplog):
    folder = FIXTURES / "qwen3_5"
    tree = tensors_of(folder)
    without = {name: each for name, each in tree.items() if not name.startswith("mtp.")}
    assert len(without) < len(tree)
    for weights, count in ((tree, 0), (without, 1)):
        with unread(folder, FLOAT32, weights=weights):
            assert len(caplog.records) == count


def test_ids_of_a_drafter_are_checked():
    folder = FIXTURES / "llama_eagle3"
    tree = dict(tensors_of(folder))
    with unread_model_or_head(folder, FLOAT32) as found:
        found.layout.fitting("drafter", tree, ())
        with pytest.raises(ValueError, match="d2t"):
            found.layout.fitting("drafter", tree | {"d2t": tree["d2t"] * 0 - 5}, ())


def test_numbers_are_finite_on_request():
    folder = FIXTURES / "qwen3"
    tree = tensors_of(folder)
    bad = {NORM: tree[NORM].at[3].set(jnp.nan)}
    for each in (bad, {NORM: np.asarray(bad[NORM])}):
        with unread(folder, FLOAT32) as found:
            filling = found.layout.fitting("weights", tree | each, ())
        with pytest.raises(ValueError, match=NORM):
            filling.check_finite("weights")


# Planted bugs


def through_bfloat16(part, tensor, dtype):
    return real_of_tensor(part, tensor.astype(jnp.bfloat16), dtype)


def unscaled(part, tensor, dtype):
    return real_of_tensor(part._replace(scale=1.0), tensor, dtype)


def scaled_twice(part, tensor, dtype):
    return real_of_tensor(part._replace(scale=part.scale**2), tensor, dtype)


real_of_tensor = leaves.Part.of_tensor
BUGS = [
    (through_bfloat16, "nemotron_h", BFLOAT16),  # P7: decay rates stay in float32
    (unscaled, "granitemoehybrid", FLOAT32),  # P8
    (scaled_twice, "falcon_h1", FLOAT32),  # P8
]


@pytest.mark.few(1)
@pytest.mark.parametrize("bug, fixture, dtype", BUGS)
def test_the_law_of_leaves_sees(bug, fixture, dtype, monkeypatch):
    monkeypatch.setattr(leaves.Part, "of_tensor", bug)
    leaves._compiled.cache_clear()
    with pytest.raises(AssertionError):
        check_update(fixture, dtype)
    leaves._compiled.cache_clear()


def test_a_head_that_is_zeroed_is_seen(monkeypatch):
    """P2: an update without the tensors of the head."""

    def zeroed(part, tensors, device, base=None):
        return real_of(part, tensors, device, None if base is None else base * 0)

    real_of = leaves.Leaf.of
    monkeypatch.setattr(leaves.Leaf, "of", zeroed)
    with pytest.raises(AssertionError):
        test_parameters_of_missing_tensors_stay()


def test_a_head_that_differs_from_tied_embeddings_is_seen(monkeypatch):
    """P18: one of the two uses of a tied parameter is updated."""
    monkeypatch.setattr(layout_module, "_are_equal", lambda one, other: True)
    with pytest.raises(pytest.fail.Exception):
        test_a_tied_model_takes_a_head_that_equals_its_embeddings_alone()
