"""What the tests of Mosaic GPU kernels share: a device, the interpreter, fences found."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from jax._src.dispatch import runtime_tokens
from jax._src.interpreters.mlir import make_ir_context
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.mosaic.gpu import core as mosaic
from jaxlib.mlir import ir

from pallas_kernels import dispatch


class Device(NamedTuple):
    """As much as the dispatch asks of one; an H200, as a mesh describes it."""

    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"
    num_cores: int | None = 132
    compute_capability: str | None = None


@contextmanager
def watched_interpreter(cores: int) -> Generator[None]:
    """The interpreter of a card of so many cores, made to watch what wgmma reads as well."""
    wgmma: Callable[[Any, Any, Any], None] = plgpu.wgmma

    def watched(accumulator: Any, a: Any, b: Any) -> None:
        _ = a[...], b[...]
        plgpu.commit_smem()
        wgmma(accumulator, a, b)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plgpu, "wgmma", watched)
        patch.setattr(dispatch, "current_device", lambda: Device(num_cores=cores))
        forget_last_kernel()
        yield
        forget_last_kernel()


def forget_last_kernel() -> None:
    """Else one that failed makes the next ones fail, too."""
    gpu_callbacks.reset_gpu_interpret_mode_state()
    runtime_tokens.clear()


def races_found() -> bool:
    """In what the interpreter ran since the last kernel was forgotten."""
    return gpu_callbacks.get_races().races_found


def fenced(kernel: Callable[..., Any], inputs: dict[str, Any], marks: dict[str, str]) -> list[str]:
    """What the fences of the lowered kernel publish, in the order of the code.

    Args:
      kernel: from the inputs by name; of several that it is made of, the first is looked at.
      inputs: arrays or shapes.
      marks: from what may be published to a part of the instruction that does so.
    """
    traced = jax.jit(kernel).trace(**inputs)
    program = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    calls = [one for one in _operations(program) if one.name == "stablehlo.custom_call"]
    call, *_ = [one for one in calls if "mosaic_gpu" in str(one.attributes["call_target_name"])]
    context = make_ir_context()
    context.allow_unregistered_dialects = True
    mosaic.dialect.register_dialect(context)  # pyright: ignore[reportPrivateImportUsage]
    with context:
        module = ir.Module.parse(call.attributes["mhlo.backend_config"]["module"].value_bytes)
        instructions = [
            one.attributes["asm_string"].value if "asm_string" in one.attributes else one.name
            for one in _operations(module)
        ]
    found = []
    fence = False
    for instruction in instructions:
        fence |= instruction.endswith("nvvm.fence.proxy")
        for published, mark in marks.items():
            if fence and mark in instruction:
                found.append(published)
                fence = False
    return found


def _operations(module: Any) -> list[Any]:
    found: list[Any] = []
    module.operation.walk(lambda one: found.append(one) or ir.WalkResult.ADVANCE)
    return found
