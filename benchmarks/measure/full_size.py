"""Memory of models on groups of H200s, and the least time of a step: computed, not measured.

    python -m benchmarks.measure.full_size --json FILE

Memory is what `jaxspec.inspect` reports for one device of the group, traced for an H200 with the
kernels that hold weights in 8 bits; no GPU is used. The least time is that of `floor`.
"""

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import floor
from benchmarks.measure.record import Figures, parser, write
from benchmarks.published import MODELS
from jaxspec.device import StandIn, trace_for
from jaxspec.inspection import Inspection, inspect
from jaxspec.models import parse_config
from jaxspec.models.layers.moe import MoEConfig, sharing_experts
from jaxspec.plan.step_shapes import StateConfig

GROUPS = {  # numbers of GPUs
    "deepseek-v3.2": (8, 16),
    "gemma-4-e2b": (1, 2),
    "gemma-4-e4b": (1, 2),
    "kimi-linear-48b-a3b": (1, 2, 4, 8),
    "ling-3.0-flash": (2, 4, 8),
}
CONTEXT = 8192  # tokens of a request
ROWS = 1, 64
H200 = StandIn("gpu", "NVIDIA H200", "9.0")
# Of an H200: bytes for weights and caches with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 and the default
# `gpu_memory_utilization`; and bytes that a copy moves in a second.
MEMORY = 0.95 * 0.9 * 139.8 * 2**30
COPY = 4.3e12


@dataclasses.dataclass(frozen=True)
class Case:
    """A published model on a group of GPUs."""

    model: str
    devices: int
    whole_experts: bool


def cases() -> Iterator[Case]:
    for model, groups in GROUPS.items():
        has_experts = parse_config(MODELS[model].config).find_part(MoEConfig) is not None
        for devices in groups:
            for whole in (False, True)[: 1 + (has_experts and devices > 1)]:
                yield Case(model, devices, whole)


def computed(case: Case) -> Figures:
    """Return the figures of a case; the process traces for an H200 from now on.

    Raises:
        ValueError: the model is refused.
    """
    found = inspected(case)
    if found.refused:
        raise ValueError(f"{case} is refused: {found.refused}")
    fit = next(each for each in found.fits if each.max_model_len == CONTEXT)
    assert found.cache is not None and found.parameters is not None
    return dataclasses.asdict(case) | {
        "parameters": found.parameters.total,
        "weight_bytes": sum(found.weight_bytes.values()),
        "bits_8": found.weight_bytes.get("float8_e4m3fn", 0),
        "token_bytes": found.cache.token,
        "request_bytes": found.cache.request,
        "requests": max(0, int((MEMORY - fit.fixed_bytes) // fit.request_bytes)),
        "floor_ms": {str(rows): 1000 * least_seconds(case, found, rows) for rows in ROWS},
    }


def inspected(case: Case) -> Inspection:
    """Return the report of `jaxspec.inspect`, of one GPU, with drafts of the model's own head."""
    published = MODELS[case.model]
    with tempfile.TemporaryDirectory() as path:
        folder = published.write(Path(path), published.config)
        trace_for(H200)
        return inspect(
            folder,
            load_format="dummy",
            dtype="bfloat16",
            tensor_parallel_size=case.devices,
            enable_expert_parallel=case.whole_experts,
            skip_tokenizer_init=True,
            max_model_len=CONTEXT,
        )


def least_seconds(case: Case, found: Inspection, rows: int) -> float:
    """Return the floor of a step of `rows` requests of `CONTEXT` tokens, without drafts."""
    published = MODELS[case.model]
    whole = parse_config(published.config, published.generation_config)
    config = sharing_experts(whole, case.whole_experts).local(case.devices)
    policy: Any = found.state_policy or "snapshot"
    dtype: Any = found.state_dtype or "float32"
    moved = floor.step_bytes(
        config,
        rows=rows,
        context=CONTEXT,
        drafts=0,
        draft_head_dtype="bfloat16",
        emitted=1.0,
        states=StateConfig(policy, dtype),
        weight_dtype="float8_e4m3fn" if found.weight_bytes.get("float8_e4m3fn") else None,
        kv_dtype=found.kv_dtype,
    )
    return floor.step_seconds(moved, config, rows, COPY)


def main() -> None:
    args = parser(__doc__ or "").parse_args()
    results = []
    for case in cases():
        results.append(computed(case))
        print(results[-1], flush=True)
    figures = {"context": CONTEXT, "memory": MEMORY, "copy": COPY, "results": results}
    write(args.json, figures)


if __name__ == "__main__":
    main()
