"""Kernel launches of a compiled program and the bytes that each moves, from its optimised HLO.

    for launch in step_launches(compiled.hlo, taken=("noise",)):
        launch.kernel, launch.times, launch.reads, launch.writes

A launch is an instruction that XLA's GPU runtime starts separately: a fusion, a custom call, a copy
or a collective. Its bytes are those of its operands and results, each counted once, as if nothing
were read twice or cached by the GPU. If only slices or rows of an operand are read, only these
count. If an array is updated in place, only the update counts. The update by a custom call is
unknown, so at most the bytes of the call's other operands count.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import NamedTuple


class Launch(NamedTuple):
    """A launch of a kernel or of another operation of the runtime.

    Attributes:
      kernel: name of the instruction in the HLO.
      operation: name of the JAX operation, from the metadata; may be empty for fused operations.
      times: number of executions: the product of the trip counts of the enclosing loops.
      reads: bytes read per execution.
      writes: bytes written per execution.
    """

    kernel: str
    operation: str
    times: int
    reads: int
    writes: int


class Instruction(NamedTuple):
    """A line of HLO: `name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    argument: str  # the text between the parentheses
    is_root: bool


Computation = Mapping[str, Instruction]

# Opcodes that the runtime launches. The `-done` half of an asynchronous operation is not a launch.
_LAUNCHED = {"fusion", "custom-call", "copy", "scatter", "sort", "dot", "convolution", "reduce"}
_COLLECTIVES = {"all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute"}
_SAME = {"bitcast", "copy", "reshape", "transpose", "convert"}
_TAKEN = {"slice", "dynamic-slice", "gather"}
_UPDATED = {"dynamic-update-slice": 1, "scatter": 2}


def step_launches(
    hlo: str, taken: Collection[str] = (), unknown_turns: int | None = None
) -> list[Launch]:
    """List the launches of one iteration of the loop whose trip count is unknown.

    Launches in nested loops count once per trip.

    Args:
      hlo: HLO from `Compilation`; its entry computation must contain exactly one such loop.
      taken: names of `jax.named_scope`s. A `jax.lax.cond` within one of these scopes takes the true
        branch. Any other `jax.lax.cond` takes the false branch.
      unknown_turns: trip count to assume for nested loops with unknown trip counts; None refuses
        them.

    Raises:
      ValueError: there is no such loop, or it contains another loop with an unknown trip count.
    """
    computations, entry = parse(hlo)
    loops = [one for one in computations[entry].values() if one.opcode == "while"]
    loops = [one for one in loops if _trips(one) is None]
    if len(loops) != 1:
        raise ValueError(f"the program has {len(loops)} loops of unknown trip count, not one.")
    found: list[Launch] = []
    for part in ("condition", "body"):
        step = _called(loops[0], part)
        found += _launches(computations, step, 1, taken, unknown_turns)
    return found


def _launches(
    computations: Mapping[str, Computation],
    name: str,
    times: int,
    taken: Collection[str],
    unknown_turns: int | None,
) -> Iterator[Launch]:
    computation = computations[name]

    def within(called: str, turns: int = 1) -> Iterator[Launch]:
        return _launches(computations, called, times * turns, taken, unknown_turns)

    for one in computation.values():
        if one.opcode == "while":
            known = _trips(one)
            turns = unknown_turns if known is None else known
            if turns is None:
                raise ValueError(f"the nested loop {one.name} has an unknown trip count.")
            yield from within(_called(one, "body"), turns)
            if known is None:
                yield from within(_called(one, "condition"), turns)
        elif one.opcode == "conditional":
            yield from within(_branch(one, taken))
        elif one.opcode == "call":
            yield from within(_called(one, "to_apply"))
        elif one.opcode.removesuffix("-start") in _LAUNCHED | _COLLECTIVES:
            reads, writes = _moved(computations, computation, one)
            yield Launch(one.name, _operation(one), times, reads, writes)


_IN_PLACE = re.compile(r"(?<=[{ ])\{\d*\}: \((\d+), \{\}")


def _moved(
    computations: Mapping[str, Computation], around: Computation, one: Instruction
) -> tuple[int, int]:
    """Bytes that a launch reads and writes."""
    operands = [size_of(around[name].shape) for name in one.operands]
    if updated := [int(at) for at in _IN_PLACE.findall(one.attributes)]:
        # Which part of these is written cannot be seen: at most as much as is read.
        reads = sum(operands) - sum(operands[at] for at in updated)
        return reads, min(reads, size_of(one.shape))
    if not one.opcode.startswith("fusion"):
        shape = _started(one.shape) if one.opcode.endswith("-start") else one.shape
        return sum(operands), size_of(shape)
    inner = computations[_called(one, "calls")]
    reads = sum(_read(computations, inner, at, size) for at, size in enumerate(operands))
    [root] = [instruction for instruction in inner.values() if instruction.is_root]
    return reads, _written(inner, root)


def _read(computations: Mapping[str, Computation], inner: Computation, at: int, size: int) -> int:
    """Bytes that a fusion reads of operand number `at`, which has `size` bytes."""
    [parameter] = [
        one for one in inner.values() if one.opcode == "parameter" and one.argument == str(at)
    ]
    total = 0
    for user, place in _users(inner, parameter.name):
        if user.opcode in _TAKEN and place == 0:
            total += size_of(user.shape)
        elif user.opcode == "fusion":
            total += _read(computations, computations[_called(user, "calls")], place, size)
        elif not (user.opcode in _UPDATED and place == 0):
            return size
    return min(total, size)


def _users(inner: Computation, name: str) -> Iterator[tuple[Instruction, int]]:
    """Yield the users of a value, with the value's index among the operands; follow bitcasts."""
    for one in inner.values():
        for place, operand in enumerate(one.operands):
            if operand == name:
                if one.opcode == "bitcast" and not one.is_root:
                    yield from _users(inner, one.name)
                else:
                    yield one, place


def _written(inner: Computation, root: Instruction) -> int:
    if root.opcode == "tuple":
        return sum(_written(inner, inner[name]) for name in root.operands)
    if root.opcode == "bitcast":
        return _written(inner, inner[root.operands[0]])
    if root.opcode in _UPDATED:
        return size_of(inner[root.operands[_UPDATED[root.opcode]]].shape)
    return size_of(root.shape)


def parse(hlo: str) -> tuple[dict[str, Computation], str]:
    """Parse a module; return its computations by name, and the name of the entry computation."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in hlo.splitlines():
        if head := _HEAD.match(line):
            current = computations.setdefault(head["name"], {})
            entry = head["name"] if head["entry"] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _LINE.match(line)):
            one = _instruction(found["name"], found["rest"], bool(found["root"]))
            current[one.name] = one
    return dict(computations), entry


_HEAD = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
_LINE = re.compile(r"\s+(?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<rest>.*)$")


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    end = _closing(rest, start)
    argument = rest[start + 1 : end - 1]
    operands = tuple(re.findall(r"%([\w.\-]+)", argument))
    return Instruction(name, shape, rest[:start], operands, rest[end:], argument, is_root)


def _closing(text: str, start: int) -> int:
    """Return the index after the parenthesis that closes the parenthesis at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return at + 1
    raise ValueError(f"a parenthesis is not closed in {text!r}.")


def size_of(shape: str) -> int:
    """Bytes of an array, or of all arrays of a tuple; layouts and tiling are ignored."""
    total = 0
    for kind, bits, lengths in re.findall(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]", shape):
        numbers = prod(int(length) for length in lengths.split(",") if length)
        total += -(-numbers * (int(bits) if bits else 8 * (kind == "pred")) // 8)
    return total


def _started(shape: str) -> str:
    """The results in the shape of a `-start` instruction; the operands come before them."""
    start = shape.index("(", 1) if shape.startswith("((") else 1
    return shape[_closing(shape, start) :] if shape.startswith("((") else shape


def _called(one: Instruction, attribute: str) -> str:
    [name] = re.findall(rf"\b{attribute}=%?([\w.\-]+)", one.attributes)
    return name


def _branch(one: Instruction, taken: Collection[str]) -> str:
    scopes = _operation(one).split("/")
    wanted = any(scope in scopes for scope in taken)
    if found := re.search(r"branch_computations=\{([^}]*)\}", one.attributes):
        branches = re.findall(r"%([\w.\-]+)", found[1])
        if len(branches) != 2:
            raise ValueError(f"{one.name} has {len(branches)} branches, not two.")
        return branches[wanted]
    return _called(one, "true_computation" if wanted else "false_computation")


def _operation(one: Instruction) -> str:
    found = re.search(r'op_name="([^"]*)"', one.attributes)
    return found[1] if found else ""


def _trips(one: Instruction) -> int | None:
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', one.attributes)
    return int(found[1]) if found else None
