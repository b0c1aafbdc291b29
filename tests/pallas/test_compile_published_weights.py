"""Steps of models with weights in 8 and 4 bits compile for an H200 that is not there.

Every matmul of a held matrix has its kernel.
"""

import pytest
from blueprints import blueprint_of, operands_of
from jax.sharding import SingleDeviceSharding
from quantised_folders import FORMATS, integers
from sm90 import nothing_kept_on_disk

from jaxspec import device
from jaxspec.pallas import dispatch
from jaxspec.plan.plan import Program
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.runner.step import new_step

OPS = ("norm_matmul", "split_matmul", "gated", "matmul_silu", "squared_relu", "moe_experts")
IN_4_BITS = {"quantization_config": integers(group_size=128)}  # as `w4a16`
IN_NVFP4 = {"quantization_config": FORMATS["modelopt nvfp4"].config, "hidden_size": 2688}


def assert_kernels(h200, blueprint, shape):
    """The step of rows, prompt tokens and drafts compiles, and its matmuls run kernels."""
    assert sum(form is not None for form in blueprint.model_spec.forms) > 8
    rows, prompt, drafts = shape
    program = Program(rows, prompt, GREEDY, 1, drafts)
    operands = operands_of(blueprint, program, SingleDeviceSharding(h200))
    with dispatch.choices() as chosen:
        lowered = new_step(blueprint.config, program).lower(*operands)
    matmuls = {(op, how) for op, how, _ in chosen if op.startswith(OPS)}
    assert matmuls and not {(op, how) for op, how in matmuls if how != "kernel"}
    with nothing_kept_on_disk():
        lowered.compile()


@pytest.mark.mosaic
@pytest.mark.parametrize("activation_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["qwen3.5-9b", "qwen3.5-35b-a3b"])
@pytest.mark.parametrize("shape", [(1, 0, 2), (4, 0, 2), (1, 64, 0)], ids=str)
def test_steps_of_any_number_of_tokens_run_kernels(
    h200, monkeypatch, tmp_path, name, shape, activation_dtype
):
    """Of 3, 12 and 65 tokens, in blocks of 128 x 128."""
    monkeypatch.setattr(device, "default_device", lambda: h200)
    options = {"quantization": "fp8", "activation_dtype": activation_dtype}
    assert_kernels(h200, blueprint_of(tmp_path, name, drafts=2, **options), shape)


@pytest.mark.mosaic
@pytest.mark.parametrize("shape", [(1, 0, 2), (1, 64, 0)], ids=str)
def test_steps_with_weights_in_4_bits_run_kernels(h200, monkeypatch, tmp_path, shape):
    """Of 3 and 65 tokens."""
    monkeypatch.setattr(device, "default_device", lambda: h200)
    blueprint = blueprint_of(tmp_path, "qwen3.5-27b", drafts=2, config=IN_4_BITS)
    assert_kernels(h200, blueprint, shape)


@pytest.mark.mosaic
@pytest.mark.soak
def test_a_step_with_an_odd_multiple_of_128_features_runs_kernels(h200, monkeypatch, tmp_path):
    """As in Nemotron-3-Nano: rows of the weight are no whole number of 128 bytes."""
    monkeypatch.setattr(device, "default_device", lambda: h200)
    blueprint = blueprint_of(tmp_path, "qwen3.5-9b", drafts=2, config=IN_NVFP4)
    assert_kernels(h200, blueprint, (1, 0, 2))
