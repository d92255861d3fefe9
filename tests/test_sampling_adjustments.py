"""Bias, penalties and the least length: Hugging Face's scores, vLLM's formula, and whole texts."""

import json
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from places import GOLDENS
from tiny_models import imitating_drafter
from trees import tree_of

from redrafter_jax import SamplingConfig, TreeConfig, generate, generate_autoregressive, stream
from redrafter_jax.config import TargetConfig
from redrafter_jax.engine.chunks import controls_of
from redrafter_jax.engine.messages import Request
from redrafter_jax.models.target import Target
from redrafter_jax.sampling import adjust_nodes, adjustment_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

V = 7  # of the golden
NODES = 9


@cache
def cases() -> list[dict[str, Any]]:
    return json.loads((GOLDENS / "adjustments.json").read_text())


def scores_of(configs: list[SamplingConfig], lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The golden's logits adjusted, where so many tokens of a text are decided.

    The others, up to 8, are a chain in a tree whose every node has a sibling before it.

    Returns:
      [cases V] scores after the whole text, and the same after the decided part with no node.
    """
    requests, texts, stops = {}, np.zeros((len(configs), 12), np.int32), []
    tokens, parents, last = [], [], []
    for at, (case, config, length) in enumerate(zip(cases(), configs, lengths, strict=True)):
        requests[at] = Request(case["text"][: case["prompt"]], 20, 0, config)
        texts[at] = -3  # past a text anything
        texts[at, :length] = case["text"][:length]
        stops.append([*case["stops"], -1, -1][:3])
        own, above = [case["text"][length - 1]], [0]
        for token in case["text"][length:]:
            parent = len(own) - 1
            own += [(token + 1) % V, token]
            above += [parent, parent]
        last.append(len(own) - 1)
        padding = 2 * NODES - 1 - len(own)
        tokens.append(own + [-1] * padding)
        parents.append(above + [0] * padding)
    tree = tree_of(np.asarray(tokens), np.asarray(parents))
    config: Any = TargetConfig(V, 4, 4, 1, 1, 1, 4, 1e4, 1e-6, 64, False, ())
    controls = controls_of(config, requests, len(configs))
    assert controls is not None
    logits = np.asarray([case["logits"] for case in cases()], np.float32)
    at_nodes = np.broadcast_to(logits[:, None], (len(logits), 2 * NODES - 1, V))

    @jax.jit
    def adjusted(logits: Any, texts: Any, stops: Any) -> Any:
        adjustment = adjustment_of(controls, texts, jnp.asarray(lengths), stops, V)
        return adjust_nodes(logits, tree, adjustment)

    out = np.asarray(adjusted(at_nodes, texts, np.asarray(stops)))
    return out[np.arange(len(out)), last], out[:, 0]


def asked_in_golden(case: dict[str, Any]) -> SamplingConfig:
    return SamplingConfig(
        repetition_penalty=case["repetition"],
        logit_bias=dict(case["bias"]) or None,
        min_tokens=case["min_tokens"],
    )


@pytest.mark.parametrize("drafted", [False, True])
def test_scores_are_those_of_hugging_faces_processors(drafted: bool) -> None:
    random = np.random.default_rng(0)
    lengths = [
        int(random.integers(case["prompt"], len(case["text"]) + 1))
        if drafted
        else len(case["text"])
        for case in cases()
    ]
    ours, _ = scores_of([asked_in_golden(case) for case in cases()], lengths)
    expected = np.asarray([case["scores"] for case in cases()], float)
    expected[np.isnan(expected)] = -np.inf
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-4)


def vllm_scores(case: dict[str, Any], config: SamplingConfig) -> np.ndarray:
    """vLLM's `apply_penalties`, token by token: all in one, in its order."""
    text, prompt = case["text"], case["prompt"]
    scores = np.asarray(case["logits"], np.float64)
    for token, bias in case["bias"]:
        scores[token] += bias
    for token in range(V):
        count = text[prompt:].count(token)
        if token in text:
            rate = config.repetition_penalty
            scores[token] *= rate if scores[token] <= 0 else 1 / rate
        scores[token] -= config.frequency_penalty * count
        scores[token] -= config.presence_penalty * (count > 0)
    return scores


def test_presence_and_frequency_count_new_tokens_as_vllm_does() -> None:
    random = np.random.default_rng(1)
    configs = [
        SamplingConfig(
            presence_penalty=float(random.uniform(-2, 2)),
            frequency_penalty=float(random.uniform(-2, 2)),
            repetition_penalty=case["repetition"],
            logit_bias=dict(case["bias"]) or None,
        )
        for case in cases()
    ]
    lengths = [int(random.integers(case["prompt"], len(case["text"]) + 1)) for case in cases()]
    ours, _ = scores_of(configs, lengths)
    expected = [vllm_scores(case, one) for case, one in zip(cases(), configs, strict=True)]
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-4)


MIXED = [
    SamplingConfig(),
    SamplingConfig(presence_penalty=1.5),
    SamplingConfig(temperature=1.0, frequency_penalty=0.7, min_tokens=6),
    SamplingConfig(repetition_penalty=1.4, logit_bias={3: 4.0, 5: -100}),
    SamplingConfig(
        temperature=1.0,
        top_p=0.9,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        repetition_penalty=0.8,
        min_tokens=12,
    ),
    SamplingConfig(temperature=1.0),
]
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "eos_token_ids": [2, 7]}


def requests(rows: int, seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "prompts": [random.integers(24, size=random.integers(1, 30)).tolist() for _ in range(rows)],
        "sampling": (MIXED * rows)[:rows],
        **OPTIONS,
    }


def test_whole_texts_are_those_of_a_loop_that_adjusts_by_itself(habitual_target: Target) -> None:
    """Greedy rows, against the target's logits of the whole text and vLLM's formula."""
    config = SamplingConfig(
        presence_penalty=0.9, frequency_penalty=0.4, repetition_penalty=1.3, logit_bias={3: 2.0}
    )
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    ours = generate_autoregressive(
        habitual_target, [prompt], max_new_tokens=24, sampling=config, eos_token_ids=()
    )
    module, text = habitual_target.merge(), list(prompt)
    read = jax.jit(lambda tokens: module.logits(module.forward(tokens)[0]))
    for _ in range(24):
        logits = read(jnp.asarray([text + [0] * (32 - len(text))]))[0, len(text) - 1]
        scores = np.asarray(logits, np.float64)
        for token, bias in (config.logit_bias or {}).items():
            scores[token] += bias
        for token in set(text):
            scores[token] *= 1.3 if scores[token] <= 0 else 1 / 1.3
            count = text[len(prompt) :].count(token)
            scores[token] -= 0.4 * count + 0.9 * (count > 0)
        text.append(int(scores.argmax()))
    assert ours.tokens == [text[len(prompt) :]]


def test_texts_are_those_without_speculation(habitual_target: Target) -> None:
    drafter = imitating_drafter(habitual_target, 0.3)
    asked = requests(12, 0)
    plain = generate_autoregressive(habitual_target, **asked)
    ours = generate(
        habitual_target, drafter, tree=TreeConfig(beam_width=4, draft_rounds=3), **asked
    )
    assert ours.tokens == plain.tokens
    assert ours.acceptance_length > 1.3
    for text, config in zip(plain.tokens, asked["sampling"], strict=True):
        assert len(text) > config.min_tokens
        assert not set(text[: config.min_tokens]) & {2, 7}
        assert 5 not in text or not config.logit_bias


@pytest.mark.long
def test_rows_that_ask_for_nothing_keep_their_text_beside_those_that_do(
    habitual_target: Target, good_drafter: Any
) -> None:
    asked, tree = requests(6, 1), TreeConfig(beam_width=4, draft_rounds=3)
    mixed = generate(habitual_target, good_drafter, tree=tree, **asked)
    asked["sampling"] = [one if not one.adjusts else SamplingConfig() for one in asked["sampling"]]
    alone = generate(habitual_target, good_drafter, tree=tree, **asked)
    assert [mixed.tokens[0], mixed.tokens[5]] == [alone.tokens[0], alone.tokens[5]]
    assert mixed.tokens != alone.tokens


def test_a_stop_string_ends_no_text_before_its_least_length(habitual_target: Target) -> None:
    def text(min_tokens: int) -> Any:
        *_, last = stream(
            habitual_target,
            None,
            [[3, 1, 4]],
            max_new_tokens=20,
            sampling=SamplingConfig(min_tokens=min_tokens),
            eos_token_ids=(),
            detokenize=lambda tokens: "".join(f"{token % 2}" for token in tokens),
            stop_strings=["1"],
        )
        return last.generation

    whole = [token % 2 for token in text(20).tokens[0]]
    assert len(whole) == 20
    assert 1 in whole[:5], "which would end it"
    ended = whole.index(1, 5)
    assert len(text(5).tokens[0]) == ended + 1
