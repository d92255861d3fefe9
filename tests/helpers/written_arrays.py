"""What a compiled program writes to memory."""

import re
from math import prod


def written_sizes(hlo: str) -> set[int]:
    """Numbers of every floating-point array that is made outside of fusions, in loops too."""
    return {prod(shape) for shape in written_shapes(hlo)}


def written_shapes(hlo: str) -> set[tuple[int, ...]]:
    """Shapes of these arrays, without axes of length 1."""
    shapes = set()
    for computation in re.split(r"\n(?=[%E])", hlo):
        if computation.startswith(("%fused", "%gemm", "%wrapped", "%triton")):
            continue
        made = re.findall(
            r"= (?:bf16|f16|f32)\[([\d,]+)\]\S* (?!parameter|get-tuple-element|bitcast)",
            computation,
        )
        shapes |= {tuple(int(one) for one in shape.split(",") if one != "1") for shape in made}
    return shapes


def moved_sizes(hlo: str) -> set[int]:
    """Elements of every array that a copy or a transposition makes, within fusions too."""
    shapes = re.findall(r"= \w+\[([\d,]*)\]\S* (?:copy|transpose|copy-start)\(", hlo)
    return {prod(int(length) for length in shape.split(",") if length) for shape in shapes}
