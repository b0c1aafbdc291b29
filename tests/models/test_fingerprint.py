"""Fingerprints: one for a model and its weights, whatever the engine; another for any other."""

import dataclasses
import importlib

import jax.numpy as jnp
import pytest
from flax import nnx
from harness import ALONE, folder_of, model

from jaxspec.models import load_model
from jaxspec.models.base import ModelSpec
from jaxspec.models.fingerprint import fingerprint
from jaxspec.models.layers.parameters import Placement, declare
from jaxspec.parallel import Group

FLOAT32 = jnp.dtype("float32")
LEAVES = (jnp.arange(2000, dtype=jnp.float32).reshape(50, 40), jnp.ones(3, jnp.bfloat16))


@dataclasses.dataclass(frozen=True)
class Config:
    name: str
    leaves: tuple = dataclasses.field(repr=False)  # shapes and dtypes
    layer: type = dataclasses.field(default=nnx.Module, repr=False)

    @property
    def whole(self):
        return self

    def find_part(self, kind):
        return None


class Made(nnx.Module):
    def __init__(self, config, dtype, tensors):
        self.config, self.layer = config, config.layer()
        for number, leaf in enumerate(config.leaves):
            setattr(self, f"leaf{number}", declare(*leaf))

    def checkpoint(self):
        for number in range(len(self.config.leaves)):
            param = getattr(self, f"leaf{number}")
            yield Placement(f"{number}", param.shape, param)


def made(name, leaves, layer=nnx.Module, **options):
    config = Config(name, tuple((leaf.shape, leaf.dtype) for leaf in leaves), layer)
    return fingerprint(ModelSpec(Made, config, FLOAT32, (), ()), leaves, **options)


def test_equal_models_have_equal_fingerprints():
    copies = tuple(leaf + 0 for leaf in LEAVES)
    assert made("config", LEAVES) == made("config", copies)
    assert len(made("config", ())) == 64


@pytest.mark.parametrize(
    "other",
    [
        ("other", LEAVES),
        ("config", LEAVES[::-1]),
        ("config", LEAVES[:1]),
        ("config", (LEAVES[0] * 1.001, LEAVES[1])),
        ("config", (LEAVES[0], LEAVES[1].at[2].set(2))),
        ("config", (LEAVES[0].reshape(40, 50), LEAVES[1])),
        ("config", (LEAVES[0], LEAVES[1].astype(jnp.float16))),
        ("config", (LEAVES[0].astype(jnp.bfloat16), LEAVES[1])),
    ],
    ids=["config", "order", "fewer", "values", "one value", "shape", "dtype", "precision"],
)
def test_any_other_model_has_another(other):
    assert made(*other) != made("config", LEAVES)


def test_a_deterministic_engine_has_another():
    assert made("config", LEAVES, is_deterministic=True) != made("config", LEAVES)


def test_every_value_counts_and_its_place():
    """Of matrices whose sizes are powers of two, too, and for an even number of signs."""
    leaf = jnp.arange(1, 64 * 512 + 1, dtype=jnp.bfloat16).reshape(64, 512)
    corner = leaf.at[:2, 1].set(leaf[1::-1, 1])
    others = [leaf, leaf.at[:, 1:].multiply(-1), leaf.at[63, 511].set(0), corner, leaf[:, ::-1]]
    assert len({made("config", (other,)) for other in others}) == len(others)


def of_fixture(fixture, group, number=None):
    """The fingerprint of a fixture, or of one in which all values of a weight are greater."""
    loaded = model(fixture, group)
    weights = list(ModelSpec.weights_of(loaded))
    if number is not None:
        weights[number] += 0.1
    return fingerprint(ModelSpec.of(loaded, FLOAT32), weights, group)


@pytest.mark.devices
@pytest.mark.parametrize(
    ("fixture", "devices"),
    [
        ("nemotron_h", 4),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in [
                ("qwen3_5", 2),
                ("qwen3_5_moe", 2),
                ("qwen3_next", 2),
                ("granitemoehybrid", 4),
                ("falcon_h1", 2),
                ("lfm2", 4),
                ("deepseek_v32", 2),
                ("kimi_linear", 4),
                ("bailing_hybrid", 4),
                ("glm4_moe", 4),
                ("qwen3_moe", 4),
            ]
        ),
    ],
)
def test_of_several_devices_it_is_that_of_one(fixture, devices):
    alone, group = of_fixture(fixture, ALONE), Group(devices)
    assert of_fixture(fixture, group) == alone
    for number in (0, 5):
        assert of_fixture(fixture, group, number) == of_fixture(fixture, ALONE, number) != alone


@pytest.mark.devices
def test_how_devices_share_experts_does_not_show():
    pair, alone = Group(2), of_fixture("qwen3_5_moe", ALONE)
    for whole_experts in (True, False):
        loaded = load_model(
            folder_of("qwen3_5_moe"), FLOAT32, group=pair, whole_experts=whole_experts
        )
        weights = ModelSpec.weights_of(loaded)
        assert fingerprint(ModelSpec.of(loaded, FLOAT32), weights, pair) == alone


def test_classes_of_other_packages_count_by_their_sources(tmp_path, monkeypatch):
    """Another version of a registered model must not continue from keys and states of this one."""
    monkeypatch.syspath_prepend(tmp_path)

    def of(module, factor):
        text = f"from flax import nnx\n\nclass Layer(nnx.Module):\n    factor = {factor}\n"
        (tmp_path / f"{module}.py").write_text(text)
        return made("config", LEAVES, importlib.import_module(module).Layer)

    assert of("layers_here", 2) == of("layers_there", 2)
    assert len({of("layers_here", 2), of("layers_before", 3), made("config", LEAVES)}) == 3
