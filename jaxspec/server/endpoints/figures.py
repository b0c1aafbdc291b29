"""GET /figures: what the engine does, in JSON, for the page and whoever else draws it."""

import time
from typing import Annotated, Any

from fastapi import Query
from starlette.responses import Response

from jaxspec.request import DraftCounts
from jaxspec.server.errors import json_response
from jaxspec.server.routing import make_router
from jaxspec.server.service import ServiceOf
from jaxspec.server.step_watch import MAX_STEPS
from jaxspec.timeline import StepRow

router = make_router()
_SAME = ("num_running", "num_waiting", "kv_cache_usage", "num_tokens", "num_steps",
         "num_preemptions", "tokens_per_second", "max_in_flight", "memory_bytes")  # fmt: skip


@router.get("/figures")
async def figures(
    service: ServiceOf, steps: Annotated[int, Query(ge=0, le=MAX_STEPS)] = 0
) -> Response:
    """Figures by the names of `AsyncLLM.metrics`, and the times of the last `steps` steps.

    Times are seconds. Steps are noted while somebody asks for them, from the first question on.
    """
    llm = service.llm
    rows = await service.watch.last_steps(steps) if steps and llm.is_healthy else []
    told = (await service.watch.snapshot()).engine if llm.is_healthy else {}
    return json_response(
        {
            "model": service.names[0],
            "time": time.monotonic(),
            "is_healthy": llm.is_healthy,
            "max_num_seqs": llm.shapes.max_num_seqs,
            "num_pages": llm.shapes.num_pages - 1,  # beside the null page
            "page_size": llm.shapes.page_size,
            **{name: told[name] for name in _SAME if name in told},
            "acceptance": {
                method: _acceptance(DraftCounts(**counts))
                for method, counts in told.get("acceptance", {}).items()
            },
            "steps": [_step(row) for row in rows],
        }
    )


def _acceptance(counts: DraftCounts) -> dict[str, Any]:
    return {
        "num_drafts": counts.num_drafts,
        "accepted_per_position": counts.accepted_per_position,
        "drafted_per_position": counts.drafted_per_position,
        "mean_acceptance_length": counts.mean_acceptance_length,
    }


def _step(row: StepRow) -> dict[str, Any]:
    return {"name": row.name, "spans": [span._asdict() for span in row.spans]}
