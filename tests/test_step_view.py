"""A decode step drawn: every node of its tree once, and the path that was accepted."""

import xml.etree.ElementTree as ET
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import PARITY_CONFIG
from trees import tree_of

from redrafter_jax import (
    InputError,
    PromptLookup,
    SamplingConfig,
    TreeConfig,
    generate_autoregressive,
    show_tree,
    trace_step,
)
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.models.target import Target
from redrafter_jax.types import Accepted, StepTrace

LETTERS = SimpleNamespace(decode=lambda ids: "".join("abcdefgh<&"[id] for id in ids))


def traced(**changes: Any) -> StepTrace:
    """Below the root a are b and c, below b are d and, by prompt lookup, h."""
    tree = tree_of([[0, 1, 2, 3, 7, -1]], [[0, 0, 0, 1, 1, 0]])
    log_probs = np.log([[1.0, 0.5, 0.25, 0.4, 1.0, 1.0]])
    origin = jnp.asarray([[-1, 0, 0, 0, 1, -1]])
    tree = tree._replace(log_probs=jnp.asarray(log_probs), origin=origin)
    chosen = jnp.asarray([[1, 3, 0, 8, 0, 0]])
    accepted = Accepted(jnp.asarray([[0, 1, 3, 3]]), jnp.asarray([3]))
    return StepTrace(tree, chosen, accepted, jnp.asarray([3]))._replace(**changes)


def test_the_text_has_a_line_for_every_node_and_the_targets_own_token() -> None:
    assert str(show_tree(traced(), LETTERS)).splitlines() == [
        "'a'  the last token of the text so far",
        "├─ ✓ 'b'  0.50 drafter",
        "│  ├─ ✓ 'd'  0.80 drafter",
        "│  └─ · 'h'  lookup",
        "└─ · 'c'  0.25 drafter",
        "'<'  the target's own token; tokens gained: 3",
    ]


def test_the_picture_is_of_the_same_nodes_and_its_texts_are_escaped() -> None:
    view = show_tree(traced(), LETTERS)
    assert view._repr_svg_() == view.svg
    picture = ET.fromstring(view.svg)
    inside = "{http://www.w3.org/2000/svg}"
    groups = picture.findall(f"{inside}g")
    tokens = [group.findall(f"{inside}text")[0].text for group in groups]
    assert sorted(map(str, tokens)) == ["'<'", "'a'", "'b'", "'c'", "'d'", "'h'"]
    accepted = {
        group.findall(f"{inside}text")[0].text for group in groups if group.get("class") == "yes"
    }
    assert accepted == {"'a'", "'b'", "'d'", "'<'"}
    corners = {(group[0].get("x"), group[0].get("y")) for group in groups}
    assert len(corners) == len(groups), "no node lies on another"
    _, _, width, height = map(float, str(picture.get("viewBox")).split())
    for x, y in corners:
        assert 0 <= float(str(x)) <= width - 130
        assert 0 <= float(str(y)) <= height - 26


def test_the_style_of_the_picture_is_for_itself_alone() -> None:
    picture = ET.fromstring(show_tree(traced(), LETTERS).svg)
    style = picture.findtext("{http://www.w3.org/2000/svg}style") or ""
    selectors = [rule.partition("{")[0] for rule in style.split("}") if rule]
    assert len(selectors) > 1
    for selector in selectors:
        assert selector.startswith(f".{picture.get('class')} ")
        assert "," not in selector


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(InputError, match="The text of this row ended before the step"):
        show_tree(traced(gained=jnp.asarray([0])), LETTERS)
    with pytest.raises(InputError, match="row"):
        show_tree(traced(), LETTERS, row=1)


@pytest.mark.usefixtures("quick_compilation")
def test_a_traced_step_decides_what_plain_decoding_does(
    habitual_target: Target, good_drafter: LoadedHead
) -> None:
    prompt, tree = [3, 1, 4], TreeConfig(beam_width=2, draft_rounds=2)
    plain = generate_autoregressive(
        habitual_target, [prompt], max_new_tokens=12, eos_token_ids=()
    ).tokens[0]
    trace = trace_step(habitual_target, good_drafter, [prompt], tree=tree)
    count = int(trace.gained[0])
    path = np.asarray(trace.accepted.path)[0, :count]
    assert int(trace.tree.tokens[0, 0]) == plain[0]
    assert np.asarray(trace.chosen)[0, path].tolist() == plain[1 : 1 + count]
    assert PARITY_CONFIG.vocab_size > max(plain)
    second = trace_step(habitual_target, good_drafter, [prompt], tree=tree, after=1)
    assert int(second.tree.tokens[0, 0]) == plain[count]
    with pytest.raises(InputError, match="after is -1"):
        trace_step(habitual_target, PromptLookup(), [prompt], after=-1)
    biased = SamplingConfig(logit_bias={3: 1.0})
    with pytest.raises(InputError, match="which trace_step does not support"):
        trace_step(habitual_target, PromptLookup(), [prompt], sampling=biased)
