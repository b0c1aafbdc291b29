"""Parallel compilation of the Mosaic kernels of a program.

XLA compiles the kernels of a program one after another, half a second each, and caches them by hash
for the process. It optimizes the whole program first, for several seconds: meanwhile the kernels
compile separately, in parallel, and fill that cache.
"""

import functools
import io
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.stages
import numpy as np
from jax.extend.backend import get_compile_options
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func

from jaxspec import device
from jaxspec.runner.programs.trace_processes import num_cores

_log = logging.getLogger(__name__)
_TARGET = "mosaic_gpu_v2"  # target of JAX 0.11's custom calls
_asked: set[str] = set()  # hashes of the kernels that this process compiles or has compiled
_lock = threading.Lock()


def compile_kernels(lowered: jax.stages.Lowered) -> None:
    """Start compiling the kernels of a program that this process has not compiled.

    This only saves time: after an error, which is logged, XLA compiles the kernel itself.
    """
    if device.default_device().platform != "gpu":
        return
    try:
        found = kernels_of(lowered.compiler_ir("stablehlo"))
        with _lock:
            for name, module in found.items():
                if name not in _asked:
                    _asked.add(name)
                    _pool().submit(_compile, module)
    except Exception as error:  # another JAX version, or the interpreter exits
        _log.info("kernels are compiled with their program: %r", error)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_cores(), "jaxspec-kernel")


def kernels_of(module: Any) -> dict[str, bytes]:
    """Return an MLIR bytecode module for each kernel of `module`, by kernel hash."""
    calls = {_hash(call): call for call in _calls(module)}
    return {name: _alone(call) for name, call in calls.items()}


def _hash(call: Any) -> str:
    return str(call.attributes["mhlo.backend_config"]["kernel_hash"])


def _calls(module: Any) -> list[Any]:
    found = []

    def visit(operation: Any) -> Any:
        target = operation.attributes.get("call_target_name")
        if target is not None and ir.StringAttr(target).value == _TARGET:
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _alone(call: Any) -> bytes:
    """Return a module that consists of the call, without aliased outputs."""
    with call.context, ir.Location.unknown():
        module = ir.Module.create()
        operands, results = [x.type for x in call.operands], [x.type for x in call.results]
        with ir.InsertionPoint(module.body):
            main = func.FuncOp("main", (operands, results))
        with ir.InsertionPoint(main.add_entry_block()):
            made = ir.Operation.create(
                call.name,
                results=results,
                operands=list(main.arguments),
                attributes={
                    name: call.attributes[name]
                    for name in call.attributes
                    if name != "output_operand_aliases"
                },
            )
            func.ReturnOp(list(made.results))
        content = io.BytesIO()
        module.operation.write_bytecode(content)
        return content.getvalue()


def _compile(module: bytes) -> None:
    here = device.default_device()
    options = get_compile_options(1, 1, device_assignment=np.array([[here.id]]))
    try:
        here.client.compile_and_load(module, [here], options)
    except Exception as error:
        _log.info("a kernel is compiled with its program: %r", error)
