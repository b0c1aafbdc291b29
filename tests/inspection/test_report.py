"""`jaxspec.inspect` and what it prints."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from harness import FIXTURES
from quantised_folders import FORMATS, write_pair, write_safetensors

import jaxspec
from jaxspec import Inspection, parallel
from jaxspec.inspection import Parameters
from jaxspec.models import load_model
from jaxspec.parallel import Group

REPORT = """\
FIXTURES/qwen3_5: Qwen3_5ForCausalLM
  read          config.json and the headers of 71 tensors in 1 file
  family        Qwen3_5
  layers        3 GatedDeltaNet + GatedMLP, 1 Attention + GatedMLP
  draft head    MTPHead
  parameters    241.1 k, of which a token uses 224.2 k
                and in the draft head 59.8 k, of which a token uses 59.8 k
  stored        587.4 KiB BF16, 0.4 KiB F32
  weights here  594.9 KiB bfloat16, 0.4 KiB float32
  a token keeps 0.5 KiB (bfloat16 keys and values)
  a request     112.3 KiB with 3 drafts, 102.3 KiB without (replay, float32)
On this device (fake, 858.3 MiB for weights and caches) weights and full requests take:
   max_model_len     1 request    8 requests   64 requests   fit at once
             512       9.3 MiB      12.1 MiB      34.2 MiB         2,152
Nothing of it is refused."""


def test_the_report_of_a_checkpoint(device_with):
    device_with(10**9)
    options = {"state_policy": "replay", "dtype": "bfloat16"}
    found = jaxspec.inspect(FIXTURES / "qwen3_5", enable_prefix_caching=False, **options)
    assert str(found).replace(str(FIXTURES), "FIXTURES") == REPORT


def test_the_embedded_model_is_the_default():
    found = jaxspec.inspect()
    assert found.refused == () and found.model == "the embedded model"
    assert found.layers == {"GatedDeltaNet + GatedMLP": 6, "Attention + GatedMLP": 2}
    assert found.draft_heads == ("MTPHead",) and found.experts is None
    assert found.family == "Qwen3_5" and found.num_drafts == 3


def test_experts_are_told():
    found = jaxspec.inspect(FIXTURES / "qwen3_next")
    assert found.layers == {
        "GatedDeltaNet + MoE": 2,
        "GatedDeltaNet + GatedMLP": 1,
        "Attention + MoE": 1,
    }
    assert found.refused == () and found.draft_heads == ("MTPHead",)
    assert re.search("experts +8 a layer, of which a token goes to 3, and 1 shared", str(found))
    plain = jaxspec.inspect(FIXTURES / "qwen3_moe")
    assert re.search("experts +8 a layer, of which a token goes to 3\n", str(plain))


@pytest.mark.devices
@pytest.mark.parametrize("is_whole", [True, False])
def test_what_each_of_two_devices_holds_is_told(is_whole):
    """Its weights are those that loading gives it."""
    folder, group = FIXTURES / "qwen3_5_moe", Group(2)
    alone = jaxspec.inspect(folder)
    found = jaxspec.inspect(folder, tensor_parallel_size=2, enable_expert_parallel=is_whole)
    assert found.refused == () and found.parameters == alone.parameters
    loaded = load_model(folder, jnp.dtype("float32"), group=group, whole_experts=is_whole)
    shards = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(nnx.state(loaded))]
    assert found.weight_bytes == {"float32": sum(shard.nbytes for shard in shards)}
    assert 2 * found.cache.token == alone.cache.token
    words = "4 a layer, 32 wide" if is_whole else "8 a layer, 16 wide"
    assert re.search(f"experts here +{words}, and 24 of the shared one\n", str(found))


def test_each_size_that_devices_cannot_share_is_told():
    found = jaxspec.inspect(FIXTURES / "qwen3_5_moe", tensor_parallel_size=3)
    names = ("linear_num_key_heads", "moe_intermediate_size", "num_attention_heads")
    assert len(found.refused) == 3 and not found.weight_bytes and found.parameters is not None
    for name, message in zip(names, found.refused, strict=True):
        assert name in message and "got 3" in message
    dense = jaxspec.inspect(
        FIXTURES / "qwen3_5", tensor_parallel_size=2, enable_expert_parallel=True
    )
    assert len(dense.refused) == 1 and "mixtures of experts" in dense.refused[0]


def test_devices_that_are_not_here_are_told_and_so_is_what_each_would_hold(monkeypatch):
    monkeypatch.setattr(parallel, "_devices_of_nodes", lambda count: [jax.local_devices()[:1]])
    found = jaxspec.inspect(FIXTURES / "qwen3_5", tensor_parallel_size=2)
    assert len(found.refused) == 1 and "got 2 with 1" in found.refused[0]
    assert found.weight_bytes and found.fits


def test_a_convolution_without_states_has_no_policy():
    found = jaxspec.inspect(FIXTURES / "lfm2")
    assert (found.family, found.refused) == ("LFM2", ())
    assert found.state_policy is None and found.state_dtype is None
    assert re.search("a request +[0-9.]+ KiB\n", str(found))
    hybrid = jaxspec.inspect(FIXTURES / "mamba2")
    assert re.search("a token keeps +nothing\n", str(hybrid))
    assert re.search(r"a request +[0-9.]+ KiB \(\w+, float32\)\n", str(hybrid))


def test_a_model_without_norms_of_heads_is_told():
    found = jaxspec.inspect(FIXTURES / "llama")
    assert (found.family, found.draft_heads, found.refused) == ("Llama", (), ())
    assert found.layers == {"Attention + GatedMLP": 6}


def test_what_the_options_ask_of_the_model_is_refused(device_with):
    device_with(10**5)
    lengths = jaxspec.inspect(FIXTURES / "qwen3", max_model_len=10**6)
    assert "must not exceed the model's 512 positions" in lengths.refused[0]
    assert lengths.parameters is not None and lengths.cache is None
    head = jaxspec.inspect(FIXTURES / "qwen3", speculative_config={"method": "mtp"})
    assert "this checkpoint has none" in head.refused[0]
    (too_big,) = jaxspec.inspect(FIXTURES / "qwen3").refused
    assert "Weights and caches must fit" in too_big


def test_options_that_break_a_rule_of_their_own_are_errors():
    with pytest.raises(TypeError, match="no option 'max_len'"):
        jaxspec.inspect(max_len=3)
    with pytest.raises(ValueError, match="state_policy must be"):
        jaxspec.inspect(state_policy="rewind")
    with pytest.raises(ValueError, match="gpu_memory_utilization must be in"):
        jaxspec.inspect(gpu_memory_utilization=2.0)


def test_a_refusal_is_told_with_all_its_reasons(copy):
    folder = copy("qwen3_5", attention_bias=True, quantization_config={"bits": 4})
    *_, head, bias, bits = str(jaxspec.inspect(folder)).splitlines()
    assert head == "REFUSED, for 2 reasons:"
    assert (
        bias.startswith(f"- {folder}/config.json: `attention_bias` must") and "quantization" in bits
    )


def test_a_head_that_is_promised_and_absent_is_missed():
    promise = {"family": "F", "promised_draft_layers": 1}
    found = Inspection("m", "config.json and headers", (), "cpu", None, **promise)
    assert re.search(
        "draft head +none, though config.json or the family promises one\n", str(found)
    )
    alone = str(jaxspec.inspect(FIXTURES / "qwen3_5", load_format="dummy"))
    assert re.search("draft head +MTPHead, by config.json; a checkpoint's tensors decide\n", alone)


def test_numbers_are_short():
    for count, words in (
        (34_660_610_688, "34.7 B"),
        (2_946_000_000, "2.95 B"),
        (122_100_000_000, "122.1 B"),
        (45_600, "45.6 k"),
        (789, "789"),
    ):
        found = Inspection("m", "read", (), "cpu", None, parameters=Parameters(count, count))
        assert re.search(f"parameters +{words}, of which a token uses {words}\n", str(found))


def test_nothing_is_put_on_the_device():
    before = {id(array) for array in jax.live_arrays()}
    jaxspec.inspect(FIXTURES / "qwen3_5", speculative_config={"draft_vocab": 9})
    assert {id(array) for array in jax.live_arrays()} <= before


@pytest.mark.parametrize("form", ["fp8 blocks", "gptq order", "ct nvfp4"])
def test_quantised_weights_are_reported_by_format(form, tmp_path):
    pair = write_pair(FIXTURES / "qwen3_5", tmp_path, FORMATS[form])
    held = {name: np.array(2, np.float32) for name in ("a.k_scale", "a.v_scale")}
    write_safetensors(pair.quantised / "model-scales.safetensors", held)
    found = jaxspec.inspect(pair.quantised, dtype="bfloat16")
    assert found.refused == ()
    kind = FORMATS[form].config["quant_method"]
    assert found.quantised is not None and found.quantised.kv_scales == 2
    assert (found.quantised.kind, found.quantised.dtype) == (kind, "bfloat16")
    plain = jaxspec.inspect(pair.plain, dtype="bfloat16")
    assert plain.quantised is None and plain.weight_bytes == found.weight_bytes
    assert plain.parameters == found.parameters
    ((label, stored),) = found.quantised.formats.items()
    assert stored.num_bytes < sum(found.stored_bytes.values())
    (line,) = (line for line in str(found).splitlines() if line.startswith("  quantised"))
    assert label in line and f"{stored.bits:.2f} bits" in line
    assert "dequantised to bfloat16" in str(found) and "2 scales" in str(found)


def test_a_quantised_configuration_alone_is_reported_by_its_kind(copy):
    folder = copy("qwen3_5", quantization_config=FORMATS["awq"].config)
    found = jaxspec.inspect(folder / "config.json")
    assert found.refused == () and found.quantised is not None
    assert (found.quantised.kind, found.quantised.formats) == ("awq", None)
    assert "awq, by config.json" in str(found)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_folder_that_quantises_keys_and_values_alone_has_no_quantised_weights(count, copy):
    declared = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    folder = copy("qwen3_5")
    (folder / "hf_quant_config.json").write_text(json.dumps(declared))
    names = [f"model.layers.{i}.self_attn.k_scale" for i in range(count)]
    held = {name: np.array(2, np.float32) for name in names}
    if held:
        write_safetensors(folder / "model-scales.safetensors", held)
    found = jaxspec.inspect(folder)
    assert found.refused == () and found.quantised is not None
    assert found.quantised.formats == {} and found.quantised.kv_scales == count
    report = str(found)
    assert "no weights, though hf_quant_config.json declares modelopt" in report
    assert "dequantised" not in report
    assert ("1 scale of keys and values is not" in report) == (count == 1)
    assert ("2 scales of keys and values are not" in report) == (count == 2)


def test_quantised_tensors_that_do_not_fit_are_refused_as_loading_does(tmp_path):
    pair = write_pair(FIXTURES / "llama", tmp_path, FORMATS["fp8 blocks"])
    config = json.loads((pair.quantised / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [32, 32]
    (pair.quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="weight_scale_inv") as caught:
        load_model(pair.quantised, jnp.dtype("float32"))
    assert jaxspec.inspect(pair.quantised).refused == (str(caught.value),)
