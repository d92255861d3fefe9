"""A picture of one decode step: the drafted tree, and the path that the target accepted."""

import math
from collections.abc import Sequence
from functools import partial
from html import escape
from typing import Any, NamedTuple

import jax
import numpy as np

from redrafter_jax.config import SamplingConfig, TreeConfig
from redrafter_jax.decoding.step import decode_step
from redrafter_jax.drafters.base import Drafter, LoadedHead
from redrafter_jax.engine.requests import Batch, Prompts, check_batch, check_size, tokenize
from redrafter_jax.engine.trees import bind_models
from redrafter_jax.errors import InputError
from redrafter_jax.generation import engine_of
from redrafter_jax.models.target import Target
from redrafter_jax.types import SOURCES, StepTrace

# Sizes in pixels: width and height of a node, gaps between nodes to the right and below.
_WIDTH, _HEIGHT, _APART, _BELOW = 130, 26, 36, 12
# Notebooks embed the picture in their page; the class keeps its style from their other pictures.
_CLASS = "redrafter-step"
_STYLE = "".join(
    f".{_CLASS} {rule}"
    for rule in (
        "text{font:13px ui-monospace,monospace;fill:#1b2028}",
        ".p{font-size:11px;fill:#586274}",
        "rect{fill:#f3f5f8;stroke:#c3cad6}",
        ".yes rect{fill:#d1e4ff;stroke:#1d5dbe;stroke-width:2}",
        "path{fill:none;stroke:#c3cad6}",
        "path.yes{stroke:#1d5dbe;stroke-width:2}",
    )
)


class TreeView(NamedTuple):
    """A drawing of a decode step; notebooks show the picture, and `print` shows the text.

    Attributes:
      text: the tree as text, one line per node.
      svg: the tree as an SVG picture.
    """

    text: str
    svg: str

    def __str__(self) -> str:
        return self.text

    def _repr_svg_(self) -> str:
        return self.svg


def trace_step(
    target: Target,
    drafter: LoadedHead | Drafter | None,
    prompts: Prompts,
    *,
    tree: TreeConfig | None = None,
    sampling: SamplingConfig | None = None,
    seeds: Sequence[int] | None = None,
    tokenizer: Any = None,
    after: int = 0,
) -> StepTrace:
    """Run one decode step and return its trace, for `show_tree`.

    Args:
      target: target, as in `generate`.
      drafter: drafter, as in `generate`.
      prompts: prompts, as in `generate`.
      tree: shape of the tree, as in `generate`, but not a table of trees.
      sampling: sampling settings, as in `generate`.
      seeds: random seeds, as in `generate`.
      tokenizer: tokenizer, as in `generate`.
      after: number of decode steps before the traced step.

    Raises:
      InputError: the errors of `generate`; a text ends before the traced step; or `sampling` has
        penalties, biases or `min_tokens`, which a single step does not support.
    """
    check_size(after, "after", least=0)
    if not isinstance(tree, TreeConfig | None):
        raise InputError(f"tree is {tree!r:.60}; give trace_step one TreeConfig, or no tree.")
    bound, (one,) = bind_models(target, drafter, tree)
    asked = tokenize(target.config, prompts, tokenizer, None)
    longest = 1 if one is None else one.max_path
    room = 2 + (after + 1) * longest
    if sampling is not None and sampling.adjusts:
        raise InputError(
            "sampling has penalties, biases or min_tokens, which trace_step does not support; "
            "leave them out."
        )
    batch = Batch(asked.prompts, room, sampling, seeds, asked.eos_token_ids)
    requests = check_batch(target.config, batch)
    engine = engine_of(target, bound, requests, one, False, False)
    for request in requests:
        engine.submit(request)
    engine.advance(passes=None, steps=0)
    for _ in range(after):
        if any(event.ended for event in engine.advance(steps=1)):
            raise InputError(
                f"after is {after}, but a text ends within these steps; give a smaller after."
            )
    step = jax.jit(partial(decode_step, tree=one))
    _, trace = step(target, bound, engine.state)
    return trace


def show_tree(trace: StepTrace, tokenizer: Any, row: int = 0) -> TreeView:
    """Draw the tree of a decode step, and the path that the target accepted.

    Each drafted token is shown with the probability that the drafter gave it after its parent. A
    token from prompt lookup has no probability. The last line shows the target's bonus token, which
    follows the accepted path.

    Args:
      trace: trace of the step, from `trace_step` or from a decode step.
      tokenizer: object whose `decode` turns token ids into text.
      row: index of the row in the batch.

    Raises:
      InputError: the row does not exist, or its text ended before the step.
    """
    rows = trace.tree.tokens.shape[0]
    check_size(row, "row", least=0, most=rows - 1)
    drawn = _drawn(jax.tree.map(lambda one: np.asarray(one)[row], trace), tokenizer)
    return TreeView(_text(drawn), _svg(drawn))


class _Node(NamedTuple):
    """A node of the tree, with the texts to draw."""

    token: str
    parent: int
    chance: str
    source: str
    accepted: bool


class _Drawn(NamedTuple):
    """What is drawn of a step.

    Attributes:
      nodes: the nodes by their index in the tree, without padding.
      own: the target's bonus token, as text.
      end: index of the last accepted node, which the bonus token follows.
    """

    nodes: dict[int, _Node]
    own: str
    end: int

    def children(self, parent: int) -> list[int]:
        return [at for at, node in self.nodes.items() if at and node.parent == parent]


def _drawn(trace: StepTrace, tokenizer: Any) -> _Drawn:
    """Collect the nodes of one row from a trace; the trace has no batch axis."""
    tree, accepted = trace.tree, trace.accepted
    if not int(trace.gained):
        raise InputError("The text of this row ended before the step; show another row.")
    path = [int(node) for node in accepted.path[: int(accepted.count)]]

    def spell(token: int) -> str:
        text = tokenizer.decode([token])
        return repr(text if text else f"<{token}>")

    nodes = {}
    for at, token in enumerate(tree.tokens.tolist()):
        if token < 0:
            continue
        parent, origin = int(tree.parents[at]), int(tree.origin[at])
        score = float(tree.log_probs[at]) - float(tree.log_probs[parent])
        by_drafter = at > 0 and SOURCES[origin] == "drafter"
        chance = f"{math.exp(score):.2f}" if by_drafter and math.isfinite(score) else ""
        source = "" if at == 0 else SOURCES[origin]
        nodes[at] = _Node(spell(token), parent, chance, source, at in path)
    return _Drawn(nodes, spell(int(trace.chosen[path[-1]])), path[-1])


def _text(drawn: _Drawn) -> str:
    lines = [f"{drawn.nodes[0].token}  the last token of the text so far"]

    def add(parent: int, before: str) -> None:
        children = drawn.children(parent)
        for child in children:
            node, last = drawn.nodes[child], child == children[-1]
            mark = "✓" if node.accepted else "·"
            told = " ".join(filter(None, (node.chance, node.source)))
            lines.append(f"{before}{'└─' if last else '├─'} {mark} {node.token}  {told}")
            add(child, before + ("   " if last else "│  "))

    add(0, "")
    gained = sum(node.accepted for node in drawn.nodes.values())
    lines.append(f"{drawn.own}  the target's own token; tokens gained: {gained}")
    return "\n".join(lines)


def _svg(drawn: _Drawn) -> str:
    places: dict[int, tuple[int, float]] = {}
    leaves = 0

    def place(node: int, depth: int) -> float:
        nonlocal leaves
        ends = [place(child, depth + 1) for child in drawn.children(node)]
        if not ends:
            ends, leaves = [float(leaves)], leaves + 1
        places[node] = depth, (ends[0] + ends[-1]) / 2
        return places[node][1]

    place(0, 0)
    own = -1  # the target's bonus token, one column after the last accepted node
    depth, level = places[drawn.end]
    taken = {where for where in places.values() if where[0] == depth + 1}
    while any(abs(other - level) < 1 for _, other in taken):
        level += 1
    places[own] = depth + 1, level

    def corner(node: int) -> tuple[int, float]:
        depth, level = places[node]
        return 10 + depth * (_WIDTH + _APART), 10 + level * (_HEIGHT + _BELOW)

    lines, boxes = [], []
    shown = {at: (node.token, node.chance or node.source, node.accepted, node.parent)
             for at, node in drawn.nodes.items()}  # fmt: skip
    shown[own] = drawn.own, "target", True, drawn.end
    for at, (token, note, accepted, parent) in shown.items():
        x, y = corner(at)
        kind = ' class="yes"' if accepted else ""
        if at:
            left, top = corner(parent)
            start, middle = (left + _WIDTH, top + _HEIGHT / 2), y + _HEIGHT / 2
            bend = (start[0] + x) / 2
            lines.append(
                f'<path{kind} d="M{start[0]} {start[1]:g}C{bend:g} {start[1]:g} {bend:g} '
                f'{middle:g} {x} {middle:g}"/>'
            )
        text = token if len(token) <= 11 else token[:10] + "…"
        boxes.append(
            f'<g{kind}><rect x="{x}" y="{y:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>'
            f'<text x="{x + 6}" y="{y + 17:g}">{escape(text)}</text><text class="p" '
            f'x="{x + _WIDTH - 6}" y="{y + 17:g}" text-anchor="end">{escape(note)}</text></g>'
        )
    width = 20 + _WIDTH + max(depth for depth, _ in places.values()) * (_WIDTH + _APART)
    height = 20 + _HEIGHT + max(level for _, level in places.values()) * (_HEIGHT + _BELOW)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{_CLASS}" '
        f'viewBox="0 0 {width} {height:g}" '
        f'width="{width}" height="{height:g}" role="img"><style>{_STYLE}</style>'
        f'<rect width="{width}" height="{height:g}" style="fill:#fff;stroke:none"/>'
        f"{''.join(lines)}{''.join(boxes)}</svg>"
    )
