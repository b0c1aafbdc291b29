"""Scheme: what each kind of configuration declares, and what is refused by name."""

import json

import pytest
from quantised_folders import FORMATS, IN_FP8, ct, gptq_config, integers, modelopt

from jaxspec.models.fields import Fields, read_fields
from jaxspec.models.quantised.scheme import AWQ, GPTQ, PER_ROW, PER_TENSOR, Scheme

AWQ_CONFIG = FORMATS["awq"].config
FP8 = FORMATS["fp8 tensor"].config
IN_INT8 = {"num_bits": 8, "type": "int"}


@pytest.mark.parametrize("name", FORMATS)
def test_the_configuration_of_every_format_is_read(name):
    form = FORMATS[name]
    scheme = Scheme.of(form.config, form.beside or "config.json")
    methods = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq"}
    assert scheme.kind == form.config.get("quant_method", methods.get(form.beside))


def test_what_configurations_declare():
    blocks = Scheme.of({**FP8, "weight_block_size": [128, 64], "activation_scheme": "dynamic"})
    assert blocks.grains == {(128, 64)} and blocks.input_bits == 8
    assert Scheme.of(integers(8, group_size=32)).groups == {32}
    for algorithm in ("FP8_PB_WO", "nvfp4", "MIXED_PRECISION"):
        grains = {PER_TENSOR, PER_ROW, (128, 128)}
        assert Scheme.of(modelopt(algorithm)).grains == grains
    assert Scheme.of(AWQ_CONFIG).integers == AWQ()
    rules = {"-:.*q_proj": {}, "+:.*k_proj": {"bits": 8, "group_size": -1}, "x": {"bits": 16}}
    scheme = Scheme.of(gptq_config(dynamic=rules))
    assert (scheme.bits, scheme.groups) == ({4, 8}, {16, None})


@pytest.mark.parametrize(
    ("config", "added"),
    [
        ({}, 1),
        ({"checkpoint_format": "gptq"}, 1),
        ({"checkpoint_format": "gptq_v2"}, 0),
        ({"format": "gptq_v2"}, 0),
        ({"sym": None}, 1),
        ({"sym": None, "checkpoint_format": "gptq_v2"}, 0),
        ({"sym": True}, None),
        ({"sym": True, "checkpoint_format": "gptq_v2"}, None),
    ],
)
def test_stored_zero_points_of_gptq_count_if_it_is_not_symmetric(config, added):
    assert Scheme.of(gptq_config(**config)).integers == GPTQ(added)


@pytest.mark.parametrize(
    ("config", "zeros", "order"),
    [
        (integers(), False, False),
        (integers(symmetric=True, actorder=None), False, False),
        (integers(symmetric=False, actorder="static"), True, False),
        (integers(actorder="group"), False, True),
        (integers(actorder=True), False, True),
        (AWQ_CONFIG, True, False),
        (gptq_config(), True, False),
        (gptq_config(sym=True, desc_act=False), False, False),
        (gptq_config(sym=True, desc_act=True), False, True),
        (gptq_config(desc_act=True, static_groups=True), True, False),
    ],
)
def test_integers_have_zero_points_and_an_order_as_declared(config, zeros, order):
    scheme = Scheme.of(config)
    assert (scheme.has_zeros, scheme.has_order) == (zeros, order)


@pytest.mark.parametrize("name", ["modelopt", "modelopt_fp4", "modelopt_mixed"])
def test_words_of_modelopt_are_read_in_any_case(name):
    for algorithm in ("fp8", "NvFp4", "mixed_precision"):
        assert Scheme.of({"quant_method": name, "quant_algo": algorithm}).kind == "modelopt"


@pytest.mark.parametrize("name", ["auto-round", "auto_round", "intel/auto-round"])
def test_auto_round_has_the_packing_that_is_declared(name):
    config = {**FORMATS["auto-round"].config, "quant_method": name}
    del config["packing_format"]
    for more, layout in [
        ({}, GPTQ(None)),
        ({"backend": "auto_round:gptq:exllamav2"}, GPTQ(None)),
        ({"backend": "auto_round:auto_awq"}, AWQ()),
        ({"backend": "auto_awq", "packing_format": "auto_round:auto_gptq"}, GPTQ(None)),
    ]:
        scheme = Scheme.of({**config, **more})
        assert (scheme.kind, scheme.integers) == ("auto-round", layout)


def test_rules_for_modules_of_16_bits_say_nothing_about_integers():
    rules = {"+:x": {"bits": 16, "sym": True, "group_size": 7}}
    assert Scheme.of(gptq_config(dynamic=rules)).groups == {16}
    rules["+:x"]["bits"] = 8
    assert Scheme.of(gptq_config(dynamic=rules, sym=None)).bits == {4, 8}


@pytest.mark.parametrize(
    "config",
    [
        {"format": "dense"},
        {"kv_cache_scheme": {"num_bits": 8}, "config_groups": None},
        {"config_groups": {"a": {"weights": None, "output_activations": IN_INT8}}},
        {"config_groups": {"a": {"weights": None, "input_activations": IN_INT8}}},
    ],
)
def test_groups_without_weights_declare_nothing(config):
    scheme = Scheme.of({"quant_method": "compressed-tensors", **config})
    assert scheme == Scheme("compressed-tensors", has_weights=False)


def test_published_formats_have_weights():
    for form in FORMATS.values():
        assert Scheme.of(form.config, form.beside or "config.json").has_weights
    assert not Scheme.of(modelopt(None)).has_weights


def test_activations_that_nothing_rounds():
    group = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}
    only = modelopt("NVFP4", config_groups={"group_0": {**group, "input_activations": None}})
    assert Scheme.of(only).input_bits is None
    assert Scheme.of(modelopt("NVFP4")).input_bits == 4
    assert Scheme.of(integers()).input_bits == 8


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (modelopt("NVFP4"), True),
        (modelopt("W4A16_NVFP4"), True),
        (modelopt("FP8"), False),
        (FORMATS["ct nvfp4"].config, True),
        (FORMATS["ct mxfp4"].config, False),
        (FORMATS["ct fp8 rows"].config, False),
        (integers(), False),
    ],
)
def test_float4_is_declared_whatever_activations_are(form, expected):
    assert Scheme.of(form).has_float4 == expected


INTEGERS = [FORMATS[name].config for name in ("gptq", "awq", "auto-round", "auto-round awq")]
REFUSED = {
    "quant_method": [
        {},
        {"bits": 4},
        *({"quant_method": method} for method in ("bitsandbytes", "hqq", "torchao", "exl3", 5)),
    ],
    "fmt": [{**FP8, "fmt": "e5m2"}],
    "activation_scheme": [{**FP8, "activation_scheme": "other"}],
    "weight_block_size": [
        {**FP8, "weight_block_size": size} for size in ([128], 128, [0, 1], [2, 500])
    ],
    "quant_algo": [
        modelopt(algorithm) for algorithm in ("W4A8_AWQ", "NVFP4_AWQ", "NVFP4_SVD", "INT8_SQ", 1)
    ]
    + [modelopt("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "W4A8_AWQ"}})],
    "group_size": [modelopt("NVFP4", group_size=32), gptq_config(group_size=0)],
    "bits": [gptq_config(bits=bits) for bits in (2, 3, 16, "4", True)]
    + [{**AWQ_CONFIG, "bits": 8}, gptq_config(dynamic={"+:x": {"bits": 3}})],
    "is_marlin_format": [gptq_config(is_marlin_format=True)],
    "checkpoint_format": [gptq_config(checkpoint_format="marlin")],
    "dynamic": [
        gptq_config(dynamic=dict.fromkeys(map(str, range(10**6)), {})),
        gptq_config(dynamic=3),
    ],
    **{
        name: [{**config, name: {"x": 1}} for config in INTEGERS]
        for name in ("spinquant_config", "rotation_config", "hadamard_config", "transform_config")
    },
    "sym": [gptq_config(dynamic={"+:x": {"sym": True}}), gptq_config(sym=1)],
    "version": [{**AWQ_CONFIG, "version": version} for version in ("gemv", "marlin")],
    "zero_point": [{**AWQ_CONFIG, "zero_point": False}],
    "packing_format": [{**FORMATS["auto-round"].config, "packing_format": "auto_round:exl"}],
    "act_bits": [{**FORMATS["auto-round"].config, "act_bits": 8}],
    "format": [{**integers(), "format": form} for form in ("marlin-24", "int-quantized", 1)],
    "config_groups": [{"quant_method": "compressed-tensors"}],
    "sparsity_config": [{**integers(), "sparsity_config": {"format": "sparse-24-bitmask"}}],
    "input_activations.type": [
        {**integers(), "config_groups": {"g": {"weights": {}, "input_activations": IN_INT8}}}
    ],
    "output_activations": [
        {**integers(), "config_groups": {"g": {"weights": {}, "output_activations": IN_INT8}}}
    ],
    "num_bits": [integers(2), ct(num_bits=16, type="float", strategy="tensor")],
    "strategy": [
        integers(strategy="tensor"),
        integers(strategy="block"),
        ct(**IN_FP8, strategy="token"),
    ],
    "block_structure": [
        ct(**IN_FP8, strategy="block"),
        ct(**IN_FP8, strategy="block", block_structure=[8, 8]),
    ],
}


@pytest.mark.parametrize("culprit", REFUSED)
def test_what_is_not_implemented_is_refused_by_its_field(culprit):
    for config in REFUSED[culprit]:
        with pytest.raises(ValueError, match=rf"config\.json.*{culprit}`.*16-bit folder") as error:
            Scheme.of(config)
        assert len(str(error.value)) < 600


@pytest.mark.parametrize("key", ["x" * 10**6, "\x1b[2J" * 99])
@pytest.mark.parametrize("value", [3, {"quant_algo": "W4A8_AWQ"}])
def test_names_of_modules_neither_flood_nor_control_the_terminal(key, value):
    with pytest.raises(ValueError, match="quantized_layers") as error:
        Scheme.of(modelopt("MIXED_PRECISION", quantized_layers={key: value}))
    assert len(str(error.value)) < 600 and str(error.value).isprintable()


@pytest.mark.parametrize("what", ["group_size", "weight_block_size"])
def test_a_folder_has_few_sizes_of_groups_and_blocks(what):
    """Each size is tried for each weight."""
    sizes = range(1, 18)
    groups = {
        str(size): {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}}
        if what == "group_size"
        else {"weights": {**IN_FP8, "strategy": "block", "block_structure": [1, size]}}
        for size in sizes
    }
    for size in sizes if what == "group_size" else ():
        groups[str(size)]["weights"]["group_size"] = size
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    with pytest.raises(ValueError, match="at most 16 .* got 17"):
        Scheme.of(config)
    del groups["1"]
    scheme = Scheme.of(config)
    assert len(scheme.groups | scheme.grains) == 16


@pytest.mark.parametrize("form", [form for form in FORMATS.values() if form.beside])
def test_files_beside_config_json_count_if_it_says_nothing(form, tmp_path):
    (tmp_path / form.beside).write_text(json.dumps(form.config))
    published = {"architectures": ["X"]}
    (tmp_path / "config.json").write_text(json.dumps(published))
    scheme = read_fields(tmp_path).scheme()
    assert scheme is not None and scheme.kind in ("modelopt", "gptq")
    assert scheme.file == form.beside
    (tmp_path / "config.json").write_text(json.dumps({**published, "quantization_config": FP8}))
    assert read_fields(tmp_path).scheme().kind == "fp8"
    (tmp_path / "config.json").write_text(json.dumps(published))
    wrong = {**form.config, "bits": 3, "quantization": {"quant_algo": "INT3"}}
    (tmp_path / form.beside).write_text(json.dumps(wrong))
    with pytest.raises(ValueError, match=form.beside):
        read_fields(tmp_path).scheme()


def test_a_folder_that_says_nothing_has_no_scheme():
    assert Fields({"architectures": ["X"], "quantization_config": None}).scheme() is None
