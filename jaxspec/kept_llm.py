"""`generate`: one call completes prompts, with an LLM that is kept for the next call."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.llm import LLM
from jaxspec.options import EngineConfig
from jaxspec.outputs import RequestOutput
from jaxspec.per_prompt import params_of
from jaxspec.process import check_process, first_process
from jaxspec.prompts import Prompt, is_one_prompt, prompts_of
from jaxspec.sampling_params import SamplingParams

_KEPT: dict[EngineConfig, LLM] = {}  # what `generate` keeps, by its options
_KEPT_LOCK = threading.Lock()  # one thread at a time loads or drops one


def generate(
    prompts: Prompt | Sequence[Prompt],
    model: str | Path | None = None,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    **options: Any,
) -> RequestOutput | list[RequestOutput]:
    """Complete one prompt or several with the embedded model, or with `model`.

    One `RequestOutput` for one prompt, a list for a list. `options` are those of `LLM`; the LLM is
    kept for the next call with the same options.
    """
    is_single = is_one_prompt(prompts)
    batch = prompts_of(prompts)
    num_samples = sum(param.n for param in params_of(sampling_params, len(batch)))
    rows = options.get("max_num_seqs") or (1 if num_samples < 2 else 8)
    key = EngineConfig.of(model, options)
    check_process(first_process())  # whose threads may hold the lock
    with _KEPT_LOCK:
        if key not in _KEPT or _KEPT[key].shapes.max_num_seqs < rows:
            _KEPT.clear()  # one model at a time: the old one's memory goes first, if nobody uses it
            _KEPT[key] = LLM(model, **{"max_num_seqs": rows, **options})
        llm = _KEPT[key]
    outputs = llm.generate(batch, sampling_params)
    return outputs[0] if is_single else outputs
