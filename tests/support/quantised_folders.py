"""Quantised folders: a small writer per format, which also gives the weights that it stores.

Each writer gets a matrix and returns the tensors of the module and the matrix that a reader must
find, in float32: numbers and scales multiplied element by element in float64, and rounded once.
"""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

BF16, E4M3, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(BF16): "BF16",
    np.dtype(E4M3): "F8_E4M3",
    np.dtype(E8M0): "F8_E8M0",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
BLOCK = (48, 40)  # of which matrices of the fixtures have partial ones, in both directions
GROUP = 16


class Stored(NamedTuple):
    """The tensors of a module by the last part of their names, and the weight they stand for."""

    tensors: dict[str, np.ndarray]
    weight: np.ndarray


def write_safetensors(path, tensors, names=NAMES):
    """Write a file; safetensors' own writer has no FP8. `names` are those of dtypes."""
    header, start = {}, 0
    for name, values in tensors.items():
        end = start + values.nbytes
        shape = list(values.shape)
        entry = {"dtype": names[values.dtype], "shape": shape, "data_offsets": [start, end]}
        header[name], start = entry, end
    content = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(values).tobytes() for values in tensors.values())
    path.write_bytes(len(content).to_bytes(8, "little") + content + data)


def repeated(scale, shape, block):
    """The scale of each element."""
    index = [np.arange(size) // each for size, each in zip(shape, block, strict=True)]
    return scale.astype(np.float64)[np.ix_(*index)]


def largest(weight, block):
    """The largest magnitude of each block, the last of which may be partial."""
    rows, columns = (range(0, n, each) for n, each in zip(weight.shape, block, strict=True))
    high, wide = block
    return np.array(
        [[np.abs(weight[i : i + high, j : j + wide]).max() for j in columns] for i in rows]
    )


def float8(weight, block, dtype=BF16, name="weight_scale", shape=None):
    scale = (largest(weight, block) / 448).astype(np.float32).astype(dtype)
    each = repeated(scale, weight.shape, block)
    numbers = np.clip(weight / each, -448, 448).astype(E4M3)
    stored = scale if shape is None else scale.reshape(shape)
    return Stored(
        {"weight": numbers, name: stored}, (numbers.astype(np.float64) * each).astype(np.float32)
    )


def fp8_blocks(weight):
    return float8(weight, BLOCK, name="weight_scale_inv")


def fp8_blocks_ct(weight):
    return float8(weight, BLOCK, np.float32)


def fp8_rows(weight):
    return float8(weight, (1, weight.shape[1]))


def fp8_rows_modelopt(weight):
    return float8(weight, (1, weight.shape[1]), np.float32, shape=weight.shape[:1])


def fp8_tensor(weight):
    """With a static scale of inputs, which does not count."""
    tensors, found = float8(weight, weight.shape, np.float32, shape=())
    return Stored({**tensors, "input_scale": np.array(0.37, np.float32)}, found)


def float4(weight, scale, factor):
    """The nibbles of a matrix, and the weight, for scales per group and a common factor."""
    each = repeated(scale, weight.shape, (1, weight.shape[1] // scale.shape[1])) * factor
    grid = np.array([*E2M1, *(-value for value in E2M1)])
    distance = np.abs((weight / each)[..., None] - grid)
    index = distance.argmin(-1).astype(np.uint8)
    packed = index[:, 0::2] | (index[:, 1::2] << 4)
    return packed, (grid[index] * each).astype(np.float32)


def nvfp4(weight):
    factor = np.float32(np.abs(weight).max() / 2688)
    scale = (largest(weight, (1, 16)) / (6 * factor)).astype(E4M3)
    packed, found = float4(weight, scale, np.float64(factor))
    return Stored({"weight": packed, "weight_scale": scale, "weight_scale_2": factor[...]}, found)


def nvfp4_ct(weight):
    factor = np.float32(2688 / np.abs(weight).max())
    scale = (largest(weight, (1, 16)) / 6 * factor).astype(E4M3)
    packed, found = float4(weight, scale, 1 / np.float64(factor))
    names = ("weight_packed", "weight_scale", "weight_global_scale")
    return Stored(dict(zip(names, (packed, scale, factor.reshape(1)), strict=True)), found)


def mxfp4(weight):
    exponent = np.ceil(np.log2(largest(weight, (1, 32)) / 6)).astype(int)
    packed, found = float4(weight, np.exp2(exponent), 1.0)
    return Stored(
        {"weight_packed": packed, "weight_scale": (exponent + 127).astype(np.uint8)}, found
    )


def packed(numbers, bits, order=None):
    """Words along the last axis, padded with zeros; number `order[k]` of a word is the k-th."""
    each = 32 // bits
    order = range(each) if order is None else order
    numbers = np.pad(numbers.astype(np.uint32), ((0, 0), (0, -numbers.shape[1] % each)))
    words = np.zeros((numbers.shape[0], numbers.shape[1] // each), np.uint32)
    for column, place in enumerate(order):
        words |= numbers[:, column::each] << np.uint32(bits * place)
    return words.view(np.int32)


class Rounded(NamedTuple):
    """Integers of a matrix with a scale and a zero point per row and group."""

    numbers: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    weight: np.ndarray


def rounded(weight, group_of, bits, dtype, *, symmetric):
    groups, most = group_of.max() + 1, 2**bits - 1
    scale, zero = np.empty((len(weight), groups)), np.full((len(weight), groups), 2 ** (bits - 1))
    for g in range(groups):
        part = weight[:, group_of == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scale[:, g] = np.abs(part).max(1) / (most / 2) if symmetric else (high - low) / most
        if not symmetric:
            zero[:, g] = np.clip(np.round(-low / scale[:, g]), 0, most)
    scale = np.maximum(scale, 1e-4).astype(np.float32).astype(dtype)
    each = scale.astype(np.float64)[:, group_of]
    numbers = np.clip(np.round(weight / each) + zero[:, group_of], 0, most).astype(int)
    return Rounded(numbers, scale, zero, ((numbers - zero[:, group_of]) * each).astype(np.float32))


def consecutive(columns, group):
    return np.arange(columns) // group


def w4a16(weight, bits=4, group=GROUP, *, symmetric=True, order=None):
    group_of = consecutive(weight.shape[1], group) if order is None else order
    made = rounded(weight, group_of, bits, BF16, symmetric=symmetric)
    tensors = {
        "weight_packed": packed(made.numbers, bits),
        "weight_scale": made.scale,
        "weight_shape": np.array(weight.shape, np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed(made.zero.T, bits).T
    if order is not None:
        tensors["weight_g_idx"] = order.astype(np.int32)
    return Stored(tensors, made.weight)


def scattered(columns, group=GROUP):
    """Groups of act-order: columns in a random order, `group` of them in each."""
    order = np.random.default_rng(columns).permutation(columns)
    group_of = np.empty(columns, int)
    group_of[order] = consecutive(columns, group)
    return group_of


def gptq(weight, bits=4, added=-1, *, symmetric=False, order=None, lie=None, group=GROUP):
    """`added` to the zero points that are stored; `lie` is stored instead."""
    group_of = consecutive(weight.shape[1], group) if order is None else order
    made = rounded(weight, group_of, bits, np.float16, symmetric=symmetric)
    stored = (made.zero + added) & (2**bits - 1) if lie is None else np.full_like(made.zero, lie)
    tensors = {
        "qweight": packed(made.numbers, bits).T,
        "qzeros": packed(stored.T, bits),
        "scales": made.scale.T,
        "g_idx": group_of.astype(np.int32),
    }
    return Stored(tensors, made.weight)


def awq(weight, group=GROUP):
    group_of = consecutive(weight.shape[1], group)
    made = rounded(weight, group_of, 4, np.float16, symmetric=False)
    tensors = {
        "qweight": packed(made.numbers.T, 4, AWQ_ORDER),
        "qzeros": packed(made.zero.T, 4, AWQ_ORDER),
        "scales": made.scale.T,
    }
    return Stored(tensors, made.weight)


def stack(write, name):
    """A writer of stacks of experts, each of them written as a matrix.

    The scales are those of single experts, side by side.
    """

    def written(weights):
        made = [write(weight) for weight in weights]
        scale = np.stack([each.tensors[name] for each in made])
        numbers = np.stack([each.tensors["weight"] for each in made])
        return Stored({"weight": numbers, name: scale}, np.stack([each.weight for each in made]))

    return written


class Format(NamedTuple):
    """A writer, and the `quantization_config` of its folder."""

    write: object
    config: dict
    beside: str | None = None  # the file with the configuration, if not config.json


def ct(**weights):
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def integers(bits=4, **more):
    strategy = {"strategy": "group", "group_size": GROUP}
    return ct(num_bits=bits, type="int", **{**strategy, **more})


def modelopt(algorithm, **more):
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}


def gptq_config(**more):
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, **more}


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True}
FP8 = {"quant_method": "fp8", "fmt": "e4m3"}
IN_FP8 = {"num_bits": 8, "type": "float"}
FORMATS = {
    "fp8 blocks": Format(fp8_blocks, {**FP8, "weight_block_size": list(BLOCK)}),
    "fp8 blocks of 128": Format(
        lambda w: float8(w, (128, 128), name="weight_scale_inv"),
        {**FP8, "weight_block_size": [128, 128]},
    ),
    "fp8 powers of two": Format(
        lambda w: float8(w, BLOCK, E8M0, "weight_scale_inv"),
        {**FP8, "weight_block_size": list(BLOCK), "scale_fmt": "ue8m0"},
    ),
    "fp8 tensor": Format(fp8_tensor, {**FP8, "activation_scheme": "static"}),
    "ct fp8 blocks": Format(
        fp8_blocks_ct, ct(**IN_FP8, strategy="block", block_structure=list(BLOCK))
    ),
    "ct fp8 rows": Format(fp8_rows, ct(**IN_FP8, strategy="channel")),
    "ct fp8 groups": Format(
        lambda w: float8(w, (1, GROUP)), ct(**IN_FP8, strategy="group", group_size=GROUP)
    ),
    "ct fp8 tensor": Format(fp8_tensor, ct(**IN_FP8, strategy="tensor")),
    "modelopt fp8": Format(fp8_tensor, modelopt("FP8")),
    "modelopt fp8 rows": Format(fp8_rows_modelopt, modelopt("FP8_PER_CHANNEL_PER_TOKEN")),
    "modelopt fp8 beside": Format(
        fp8_tensor,
        {"producer": {}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        "hf_quant_config.json",
    ),
    "modelopt nvfp4": Format(nvfp4, modelopt("NVFP4", group_size=16)),
    "ct nvfp4": Format(
        nvfp4_ct, ct(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    ),
    "ct mxfp4": Format(mxfp4, ct(num_bits=4, type="float", strategy="group", group_size=32)),
    "w4a16": Format(w4a16, integers()),
    "w4a16 zeros": Format(lambda w: w4a16(w, symmetric=False), integers(symmetric=False)),
    "w4a16 rows": Format(lambda w: w4a16(w, group=w.shape[1]), integers(strategy="channel")),
    "w4a16 order": Format(
        lambda w: w4a16(w, order=scattered(w.shape[1])), integers(actorder="group")
    ),
    "w8a16 zeros": Format(lambda w: w4a16(w, 8, symmetric=False), integers(8)),
    "awq": Format(awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "GEMM"}),
    "gptq": Format(gptq, gptq_config()),
    "gptq v2": Format(lambda w: gptq(w, added=0), gptq_config(checkpoint_format="gptq_v2")),
    "gptq 8": Format(lambda w: gptq(w, 8), gptq_config(bits=8)),
    "gptq sym": Format(lambda w: gptq(w, symmetric=True), gptq_config(sym=True)),
    "gptq sym that lies": Format(
        lambda w: gptq(w, symmetric=True, lie=8), gptq_config(sym=True, checkpoint_format="gptq")
    ),
    "gptq order": Format(
        lambda w: gptq(w, order=scattered(w.shape[1])), gptq_config(desc_act=True)
    ),
    "gptq beside": Format(
        gptq, {"bits": 4, "group_size": GROUP, "sym": False}, "quantize_config.json"
    ),
    "auto-round": Format(
        lambda w: gptq(w, symmetric=True),
        {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq"},
    ),
    "auto-round awq": Format(awq, {**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}),
}
"""Every format that is read, by name."""


def is_linear(name, shape):
    """Whether published folders quantise a tensor; not the small projections of a hybrid."""
    kept = (
        "embed",
        "lm_head",
        "shared_head.head",
        "in_proj_a",
        "in_proj_b",
        "mtp.fc",
        ".gate.",
        "conv1d",
    )
    return len(shape) == 2 and name.endswith(".weight") and not any(map(name.__contains__, kept))


class Pair(NamedTuple):
    """A quantised folder, and one with the weights that it stands for."""

    quantised: Path
    plain: Path


def write_pair(source, folder, form, others=None, chosen=is_linear):
    """Write both folders of a fixture.

    Args:
        source: The fixture.
        folder: The new folder of both.
        form: `Format` of the quantised one.
        others: Writers of single modules by a part of their names; None leaves them in 16 bits.
        chosen: Tells the quantised tensors by name and shape.
    """
    quantised, plain = folder / "quantised", folder / "plain"
    for path in (quantised, plain):
        shutil.copytree(source, path)
    tensors, weights = {}, {}
    for number, (name, values) in enumerate(
        sorted(load_file(source / "model.safetensors").items())
    ):
        write = form.write if chosen(name, values.shape) else None
        for part, other in (others or {}).items():
            write = other if part in name and write is not None else write
        if write is None:
            tensors[name] = weights[name] = values
            continue
        # Parts of one matrix of the model get scales that differ.
        stored = write(values.astype(np.float64) * (1 + number % 7 / 8))
        prefix = name.removesuffix("weight")
        tensors |= {prefix + last: part for last, part in stored.tensors.items()}
        weights[name] = stored.weight
    write_safetensors(quantised / "model.safetensors", tensors)
    write_safetensors(plain / "model.safetensors", weights)
    write_config(quantised, form)
    return Pair(quantised, plain)


def write_config(folder, form):
    if form.beside is not None:
        (folder / form.beside).write_text(json.dumps(form.config))
        return
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = form.config
    (folder / "config.json").write_text(json.dumps(config))


def write_kv_scales(folder, scales, name="self_attn."):
    """Add scales of keys and values to a 16-bit folder: two numbers by the prefix of a layer."""
    tensors = {}
    for layer, numbers in scales.items():
        for which, number in zip("kv", numbers, strict=True):
            place = f"{layer}{name}{which}_proj.{which}_scale"
            tensors[place] = np.array(number, np.float32)
    write_safetensors(folder / "model-scales.safetensors", tensors)
    declared = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(declared))
    return folder


def write_module(folder, stored, form, name="x."):
    """Write a folder with one module, for a checkpoint without a model."""
    folder.mkdir(exist_ok=True)
    tensors = {name + last: part for last, part in stored.items()}
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    write_config(folder, form)
    return folder
