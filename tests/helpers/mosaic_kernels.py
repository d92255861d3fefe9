"""What the tests of Mosaic GPU kernels share: the interpreter, waits taken away, fences found."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest
from jax._src.dispatch import runtime_tokens
from jax._src.interpreters.mlir import make_ir_context
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.mosaic.gpu import core as mosaic
from jaxlib.mlir import ir


class Device(NamedTuple):
    """As much as the dispatch asks of one; an H200, as a mesh describes it."""

    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"
    num_cores: int | None = 132
    compute_capability: str | None = None


@contextmanager
def watched_interpreter() -> Generator[None]:
    """The interpreter, made to watch what wgmma reads as well."""
    wgmma: Callable[[Any, Any, Any], None] = plgpu.wgmma

    def watched(accumulator: Any, a: Any, b: Any) -> None:
        _ = a[...], b[...]
        plgpu.commit_smem()
        wgmma(accumulator, a, b)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plgpu, "wgmma", watched)
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


def removable_waits(
    names: Sequence[str], module: ModuleType, kernel: Callable[..., Any], inputs: dict[str, Any]
) -> Callable[[str | None], bool]:
    """Whether the interpreter catches it when it runs without the wait of that name.

    One program for all, which skips the wait as it runs; its ring has two stages, so that every
    wait is needed.

    Args:
      names: of the waits, in the order in which they are traced.
      module: of the kernel and its `make_plan`.
      kernel: interpreted.
      inputs: of the kernel.
    """
    make_plan = module.make_plan
    waits = iter(names)
    wait: Callable[[Any], None] = plgpu.barrier_wait
    removed: str | None = None

    def wait_unless_removed(barrier: Any) -> None:
        name = next(waits)
        kept = jax.pure_callback(lambda: np.bool_(name != removed), jax.ShapeDtypeStruct((), bool))
        pl.when(kept)(lambda: wait(barrier))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "make_plan", lambda *shape: make_plan(*shape)._replace(stages=2))
        patch.setattr(plgpu, "barrier_wait", wait_unless_removed)
        compiled = jax.jit(kernel).lower(**inputs).compile()
    assert list(waits) == []

    def caught(name: str | None) -> bool:
        nonlocal removed
        removed = name
        forget_last_kernel()
        try:
            jax.block_until_ready(compiled(**inputs))
        except jax.errors.JaxRuntimeError:  # a slot or a barrier in a state that cannot be
            return True
        return races_found()

    return caught


def fenced(kernel: Callable[..., Any], inputs: dict[str, Any], marks: dict[str, str]) -> list[str]:
    """What the fences of the lowered kernel publish, in the order of the code.

    Args:
      kernel: from the inputs by name.
      inputs: arrays or shapes.
      marks: from what may be published to a part of the instruction that does so.
    """
    traced = jax.jit(kernel).trace(**inputs)
    program = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    calls = [one for one in _operations(program) if one.name == "stablehlo.custom_call"]
    [call] = [one for one in calls if "mosaic_gpu" in str(one.attributes["call_target_name"])]
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


def without_fence(number: int, inspect: Callable[[], list[str]]) -> list[str]:
    """What `inspect` finds where the kernel lacks one fence, counted in the order of tracing."""
    commit: Callable[[], None] = plgpu.commit_smem
    count = 0

    def commit_unless_removed() -> None:
        nonlocal count
        kept = count != number
        count += 1
        if kept:
            commit()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plgpu, "commit_smem", commit_unless_removed)
        return inspect()


def _operations(module: Any) -> list[Any]:
    found: list[Any] = []
    module.operation.walk(lambda one: found.append(one) or ir.WalkResult.ADVANCE)
    return found
