"""Tables of the engine on a GPU: steps, start, decoding, prompts, drafts and kernels."""

from collections.abc import Iterator
from typing import Any

from benchmarks.measure.model_shapes import SHAPES
from benchmarks.report.table import COMMIT, Column, Figures, Table, plural, results, size_of

Rows = Iterator[Figures]


def step_gap(figures: Figures) -> Rows:
    """Yield a row per number of rows and drafts; `at` has a result per `max_in_flight`."""
    found: dict[tuple[int, int], dict[int, Figures]] = {}
    for case in figures["results"]:
        found.setdefault((case["rows"], case["drafts"]), {})[case["max_in_flight"]] = case
    return ({"rows": rows, "drafts": drafts, "at": at} for (rows, drafts), at in found.items())


def ready(figures: Figures) -> Rows:
    for row in figures["results"]:
        first = [kind["first_token_ms"] for kind in row["kinds"]]
        gap = max(kind["largest_gap_ms"] for kind in row["kinds"])
        yield row | {"first_least": min(first), "first_most": max(first), "gap": gap}


# Decoding, prefill, start and loading

USUAL_PREFILL = {
    "drafts": 0,
    "dtype": "bfloat16",
    "state_policy": "replay",
    "state_dtype": "float32",
    "kv_dtype": None,
    "max_in_flight": 2,
    "steps_per_dispatch": 1,
}
USUAL = {key: USUAL_PREFILL[key] for key in ("dtype", "state_policy", "kv_dtype", "max_in_flight")}
START_PARTS = "import", "device", "load", "compile", "generate"
DECODE_PROMPT = 512  # tokens; cases with other prompts measure prefill
# How drafts are chosen, by the key of a result.
CHOICES = {None: "no drafter", 0: "0 drafts", 1: "1", 3: "3", "auto": '`"auto"`'}


def decode(figures: Figures) -> Rows:
    """Yield a row per shape, rows, dtype of states and steps per dispatch; `at` is by drafts."""
    found: dict[tuple[str, int, str, int], dict[int, Figures]] = {}
    for case in results(figures):
        is_usual = case.items() >= USUAL.items() and not case.get("quantization")
        if case["prompt"] == DECODE_PROMPT and is_usual:
            key = case["shape"], case["rows"], case["state_dtype"], case["steps_per_dispatch"]
            found.setdefault(key, {})[case["drafts"]] = case
    for key in sorted(found, key=lambda key: (list(SHAPES).index(key[0]), *key[1:])):
        shape, rows, dtype, steps = key
        size = size_of(shape) if shape.startswith("qwen3.5-") else shape
        name = f"{size}, {rows}, {dtype}" + f", {steps} steps" * (steps > 1)
        yield {"name": name, "at": found[key]}


def quantised(figures: Figures, in_16_bits: Figures) -> Rows:
    """Yield a row per case of decoding with published or rounded weights, beside 16 bits."""
    alike = "shape", "rows", "drafts", "steps_per_dispatch", "state_dtype"
    known = {
        tuple(case[name] for name in alike): case["ms_per_token"]
        for case in results(in_16_bits)
        if case["prompt"] == DECODE_PROMPT and not case.get("quantization")
    }
    for case in results(figures):
        if case["rows"]:
            of_16_bits = known.get(tuple(case[name] for name in alike))
            name = case["size"] if case["shape"].startswith("qwen3.5-") else case["shape"]
            yield case | {"name": name, "format": _format(case), "of_16_bits": of_16_bits}


def quantised_prompts(figures: Figures) -> Rows:
    for case in results(figures):
        if not case["rows"]:
            yield _prefill_units(_named(case)) | {"format": _format(case)}


def quantised_traffic(figures: Figures) -> Rows:
    for case in results(figures):
        options, name = case["options"], f"{case['size']}, {case['requests']} of {case['lengths']}"
        options = {"activation_dtype": None} | options
        yield (
            case
            | {"name": name.replace(" of trace", " of unequal lengths")}
            | {"format": _format(options)}
        )


def _format(case: Figures) -> str:
    return case["quantization"] + ", rounded activations" * bool(case["activation_dtype"])


def prefill(figures: Figures) -> Rows:
    found = {}
    for case in results(figures):
        if case.items() >= USUAL_PREFILL.items():
            name = f"{case['shape']}, {case['rows']} x {case['prompt']}"
            found[name] = _prefill_units(case) | {"name": name}
    yield from found.values()


def _prefill_units(case: Figures) -> Figures:
    """Return `case` with `rate` (1,000 tokens per second) and `first_ms`."""
    first = (
        {"first_ms": 1000 * case["first_token_seconds"]} if "first_token_seconds" in case else {}
    )
    return case | {"rate": case["prefill_tokens_per_second"] / 1000, **first}


def prompts_alone(figures: Figures) -> Rows:
    return (_prefill_units(_named(case)) for case in results(figures) if not case["rows"])


def prompts_beside_rows(figures: Figures) -> Rows:
    return (_prefill_units(_named(case)) for case in results(figures) if case["rows"])


def start_up(figures: Figures) -> Rows:
    for case in results(figures):
        yield _named(case) | {"lowered": case["trace"] + case["lower"]}


def _named(case: Figures) -> Figures:
    """Return `case` with its `name`: the model and its unusual options, "9B, drafts 3"."""
    unusual = [
        f"{name} {case[name]}" for name, usual in USUAL_PREFILL.items() if case[name] != usual
    ]
    return case | {"name": ", ".join([case["size"], *unusual])}


def loading(figures: Figures) -> Rows:
    for case in results(figures):
        yield case | {"stored": case["quantization"] or "bfloat16"}


def draft_head(figures: Figures) -> Rows:
    """Yield passes over the output head and whole steps, by the dtype that drafts are scored in."""
    dtypes = "bfloat16", "float8_e4m3fn"
    passes = {(p["features"], p["ids"], p["rows"], p["head"]): p["us"] for p in figures["passes"]}
    for features, ids, rows in sorted(key[:3] for key in passes if key[3] == dtypes[0]):
        times = [passes[features, ids, rows, dtype] for dtype in dtypes]
        work = f"a draft's scores: {features} features, {ids:,} ids, {rows} rows"
        yield {"work": work, "unit": "us", "times": times, "gain": times[0] / times[1]}
    steps = {result["head"]: result for result in figures["results"]}
    full = steps[dtypes[0]]
    sizes = f"9B, {full['rows']} rows, {full['drafts']} drafts, {full['steps_per_dispatch']} steps"
    for name, key in (("a step", "ms_per_step"), ("a token", "ms_per_token")):
        times = [steps[dtype][key] for dtype in dtypes]
        work = f"{name}: {sizes} a dispatch"
        yield {"work": work, "unit": "ms", "times": times, "gain": times[0] / times[1]}


def draft_counts(figures: Figures) -> Rows:
    """Yield a row per load; `times` are milliseconds per token in the order of `CHOICES`."""
    loads: dict[tuple[str, tuple[float, ...], int], dict[Any, Figures]] = {}
    plain = dict[tuple[str, int], float]()
    for case in figures["results"]:
        shape, rates, rows = case["shape"], case["rates"], case["rows"]
        if rates is None:
            plain[shape, rows] = case["ms_per_token"]
        else:
            loads.setdefault((shape, tuple(rates), rows), {})[case["drafts"]] = case
    for (shape, rates, rows), cases in loads.items():
        times = {choice: case["ms_per_token"] for choice, case in cases.items()}
        times[None] = plain[shape, rows]
        best = min(time for choice, time in times.items() if choice != "auto")
        yield {
            "name": f"{size_of(shape)}, {plural(rows, 'request')}",
            "rates": "/".join(f"{rate:.0%}" for rate in rates),
            "times": [times[choice] for choice in CHOICES],
            "auto": times["auto"] / best - 1,
            "commit": list(cases.values())[-1]["commit"],
        }


def sampling(figures: Figures) -> Rows:
    """Yield the draws by what requests ask for, and logprobs; `more` is relative to temperature."""
    for case in figures["results"]:
        if case["stage"] == "draw" and case["logits"] == "peaked":
            yield case | {"more": case["us_more"] or None}
        elif case["stage"] == "logprobs":
            yield {"asks": "logprobs, 1 to 20 of the likeliest", "more": case["us"]}


# Kernels: the layers of one model, with matmuls, Mamba2 and experts of three others

KERNEL_MODEL, MATMUL_MODEL = "qwen3.5-9b", "qwen3.5-0.8b"
MAMBA2_MODEL, EXPERTS_MODEL = "nemotron-3-nano", "qwen3.5-35b-a3b"


def kernels(figures: Figures) -> Rows:
    """Yield the cases of two batch sizes and two widths, and all of matmuls, experts, prefill."""
    for case in figures["results"]:
        number, width = case.get("rows"), case.get("width", 1)
        shown = number in (1, 64) and width in (1, 4)
        if "seqs" in case:
            number, width, shown = case["seqs"], case["length"], True
        op, model = f"`{case['op']}`", KERNEL_MODEL
        if "product" in case:
            op, model, shown = f"{op} ({case['product']} of the 0.8B)", MATMUL_MODEL, True
        if case["op"].startswith(("mamba2", "gated_group_norm")):
            model = MAMBA2_MODEL
        if case["op"].startswith("moe"):
            model, shown = EXPERTS_MODEL, True
        if case.get("model", model) != model or not shown:
            continue
        name = f"{op}, {case.get('dtype', 'int32')}, {number} x {width}"
        if "context" in case:
            name += f", context {case['context']}"
        if "window" in case:
            name += f", ring of {case['window']}"
        rate = f"{case['of_copy']:.0%}" if "of_copy" in case else f"{case['tb_per_s']:.1f} TB/s"
        if "tflop_per_s" in case:
            rate = f"{case['tflop_per_s']:.0f} TFLOP/s"
        yield case | {"name": name, "rate": rate}


def tensor_parallel(*files: Figures) -> Rows:
    """Yield each case with its gain over one device, whichever file has that."""
    alike = "shape", "rows", "drafts", "prompt"
    alone = {
        tuple(case[name] for name in alike): case["ms_per_token"]
        for case in results(*files)
        if case["tensor_parallel_size"] == 1
    }
    for case in results(*files):
        one = alone.get(tuple(case[name] for name in alike))
        gain = {"gain": f"{one / case['ms_per_token']:.2f}x"} if one else {}
        yield case | gain


def layers(figures: Figures) -> Rows:
    return iter(figures["layers"])


def replicas(figures: Figures) -> Rows:
    """Yield each number of replicas with its throughput beside one."""
    one, *_ = figures["replicas"]
    for case in figures["replicas"]:
        yield case | {"gain": case["tokens_per_second"] / one["tokens_per_second"]}


def _decode_columns(drafts: int) -> list[Column]:
    return [
        (f"{drafts} drafts: ms", f"{{at[{drafts}][ms_per_token]:.2f}}"),
        ("vLLM's over it", f"{{at[{drafts}][times_peer]:.2f}}"),
        ("of the roofline", f"{{at[{drafts}][of_roofline]:.0%}}"),
        ("commit", f"{{at[{drafts}][commit]}}"),
    ]


PREFILL = [
    ("thousand tokens a second", "{rate:.1f}"),
    ("ms to the first token (mean)", "{first_ms:.1f}"),
]

TABLES = {
    "step gap": Table(
        "step_gap_h200.json",
        step_gap,
        ("rows, drafts", "{rows}, {drafts}"),
        ("engine, `max_in_flight` 0", "{at[0][engine_ms]:.2f}"),
        ("engine, 2", "{at[2][engine_ms]:.2f}"),
        ("back to back", "{at[2][back_to_back_ms]:.2f}"),
        ("host a step (2)", "{at[2][host_ms]:.2f}"),
    ),
    "ready": Table(
        "ready_h200.json",
        ready,
        ("model", "{shape}, {rows} rows"),
        ("start", "{start}"),
        ("load, s", "{load_seconds:.1f}"),
        ("compile, s", "{compile_seconds:.1f}"),
        ("ready, s", "{ready_seconds:.1f}"),
        ("first token of each kind, ms", "{first_least:.0f} to {first_most:.0f}"),
        ("gap then, ms", "{gap:.0f}"),
        ("gap while programs compile, ms", "{largest_gap_ms_while_compiling:,.0f}"),
    ),
    "tensor parallel": Table(
        "tensor_parallel_h100.json",
        tensor_parallel,
        ("model, rows, drafts", "{size}, {rows}, {drafts}"),
        ("GPUs", "{tensor_parallel_size}"),
        ("ms per token", "{ms_per_token:.2f}"),
        ("ms per step", "{ms_per_step:.2f}"),
        ("beside one GPU", "{gain}"),
        ("prompt tokens a second", "{prefill_tokens_per_second:,.0f}"),
        COMMIT,
    ),
    "structured outputs": Table(
        "structured_outputs_h200.json",
        results,
        ("requests of 64", "{constrained}: {kind}"),
        ("ms per step", "{ms_per_step:.2f}"),
        ("tokens per second", "{tokens_per_second:,}"),
        COMMIT,
    ),
    "sums over devices": Table(
        "tensor_parallel_h200.json",
        tensor_parallel,
        ("model, rows, drafts, prompt tokens", "{size}, {rows}, {drafts}, {prompt:,}"),
        ("GPUs", "{tensor_parallel_size}"),
        ("sums", "{sums}"),
        ("ms per token", "{ms_per_token:.2f}"),
        ("ms per step", "{ms_per_step:.2f}"),
        ("beside one GPU", "{gain}"),
        COMMIT,
    ),
    "replicas": Table(
        "tensor_parallel_h200.json",
        replicas,
        ("replicas", "{replicas}"),
        ("tokens per second", "{tokens_per_second:,}"),
        ("of three calls", "{least:,} to {most:,}"),
        ("beside one", "{gain:.2f}x"),
        COMMIT,
    ),
    "layers of two devices": Table(
        "tensor_parallel_h200.json",
        layers,
        ("rows", "{rows}"),
        ("all-reduce, then norm: us", "{psum_us:.1f}"),
        ("one kernel", "{fused_us:.1f}"),
        ("without sums", "{none_us:.1f}"),
    ),
    "decode": Table(
        "decode_h200.json",
        decode,
        ("shape, rows, states", "{name}"),
        *_decode_columns(0),
        *_decode_columns(3),
    ),
    "quantised": Table(
        ("quantised_h200.json", "decode_h200.json"),
        quantised,
        ("model", "{name}"),
        ("weights", "{format}"),
        ("rows", "{rows}"),
        ("drafts", "{drafts}"),
        ("ms per token", "{ms_per_token:.2f}"),
        ("in 16 bits", "{of_16_bits:.2f}"),
        ("ms per step", "{ms_per_step:.2f}"),
        ("floor of a step", "{floor_ms_per_step:.2f}"),
        COMMIT,
    ),
    "quantised prompts": Table(
        "quantised_h200.json",
        quantised_prompts,
        ("model, prompts x tokens", "{name}, {prompts} x {prompt}"),
        ("weights", "{format}"),
        ("thousand tokens a second", "{rate:.1f}"),
        COMMIT,
    ),
    "quantised traffic": Table(
        "quantised_traffic_h200.json",
        quantised_traffic,
        ("model, requests", "{name}"),
        ("weights", "{format}"),
        ("output tokens a second", "{output_tokens_per_second:,.0f}"),
        ("tokens a second", "{total_tokens_per_second:,.0f}"),
        ("ms per token of a request", "{tpot_ms:.1f}"),
        ("floor's share of the time", "{of_floor:.0%}"),
        COMMIT,
    ),
    "draft counts": Table(
        "draft_counts_h200.json",
        draft_counts,
        ("model, load", "{name}"),
        ("drafts accepted at", "{rates}"),
        *((name, f"{{times[{i}]:.2f}}") for i, name in enumerate(CHOICES.values())),
        ("auto beside the best", "{auto:+.1%}"),
        COMMIT,
    ),
    "sampling": Table(
        "sampling_h200.json",
        sampling,
        ("asked for", "{asks}"),
        ("microseconds of a draw", "{us:.0f}"),
        ("more than temperature", "{more:+.0f}"),
    ),
    "draft head": Table(
        "draft_head_h100.json",
        draft_head,
        ("work", "{work}"),
        ("unit", "{unit}"),
        ("in bfloat16", "{times[0]:.4g}"),
        ("in 8 bits", "{times[1]:.4g}"),
        ("gain", "{gain:.2f}x"),
    ),
    "prefill": Table("decode_h200.json", prefill, ("shape, prompts x tokens", "{name}"), *PREFILL),
    "long prompts": Table(
        "prefill_h200.json",
        prompts_alone,
        ("shape, prompts x tokens, tokens a step", "{name}, {prompts} x {prompt}, {chunk}"),
        *PREFILL,
        COMMIT,
    ),
    "mixed steps": Table(
        "prefill_h200.json",
        prompts_beside_rows,
        ("shape, rows, tokens a chunk", "{name}, {rows}, {chunk}"),
        ("thousand prompt tokens a second", "{rate:.1f}"),
        *(
            (f"{column}, {words}", form.replace("STEPS", steps))
            for steps, words in (("mixed", "mixed"), ("unmixed", "not mixed"))
            for column, form in (
                ("tokens decoded a second", "{STEPS[decode_tokens_per_second]:.0f}"),
                (
                    "ms a step (99th percentile)",
                    "{STEPS[ms_per_step]:.1f} ({STEPS[ms_per_step_p99]:.1f})",
                ),
            )
        ),
        COMMIT,
    ),
    "loading": Table(
        "load_h200.json",
        loading,
        ("checkpoint", "{size}, {layers} layers, {stored}, {gigabytes:.1f} GB"),
        ("`dd`: GB a second", "{dd_gigabytes_per_second:.1f}"),
        ("loading: GB a second", "{gigabytes_per_second:.1f}"),
        ("of `dd`", "{of_dd:.0%}"),
        ("the second time", "{again_of_dd:.0%}"),
        ("GB held on the host", "{host_peak_gigabytes:.2f}"),
        ("that may be held", "{host_peak_allowed_gigabytes:.2f}"),
        ("GB on the device besides the weights", "{device_excess_gigabytes:.2f}"),
        COMMIT,
    ),
    "start-up": Table(
        "startup_h200.json",
        start_up,
        ("shape: start", "{name}, {rows} rows: {start}"),
        ("seconds to the first token", "{seconds:.1f}"),
        *((part, f"{{{part}:.1f}}") for part in START_PARTS),
        ("traced and lowered", "{lowered:.1f}"),
        ("programs from disk", "{programs_from_disk} of {programs}"),
        COMMIT,
    ),
    "kernels": Table(
        "kernels_h200.json",
        kernels,
        ("op, dtype, rows x tokens", "{name}"),
        ("microseconds", "{us:.1f}"),
        ("reference", "{reference_us:.1f}"),
        ("public Triton kernel", "{public_us:.1f}"),
        ("of the copy bandwidth, or rate", "{rate}"),
    ),
}
