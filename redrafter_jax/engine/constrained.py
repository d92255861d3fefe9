"""Decoding under grammars: a step is two programs, with host code between them.

Only the host can compute the tokens that a grammar allows after each node. So if a row of a batch
has a grammar, one program proposes the trees of a step, and another verifies them. All other steps
run without the host, in `device.decode_rows`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from redrafter_jax.config import Grammar, SamplingConfig, TargetConfig, TreeConfig
from redrafter_jax.config.drafting import longest_path
from redrafter_jax.decoding.step import as_asked, decide_step, propose, step_noise
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.tree import chain_tree, merge_trees, pad_nodes
from redrafter_jax.engine.device import with_controls
from redrafter_jax.engine.gains import Gains, gains_of_step
from redrafter_jax.engine.messages import Request
from redrafter_jax.engine.requests import PerRow, of_row, per_row
from redrafter_jax.engine.scheduler import Row
from redrafter_jax.engine.state import put_rows_back, take_rows
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import per_shard, place, to_host
from redrafter_jax.sampling import unpack_bits
from redrafter_jax.text.grammars import CompiledGrammar, GrammarCompiler
from redrafter_jax.types import SOURCES, Controls, DecodeState, TokenTree


def hold(
    config: TargetConfig,
    requests: Sequence[Request],
    grammars: PerRow[Grammar | CompiledGrammar | None],
    tokenizer: Any,
) -> list[Request]:
    """Return the requests with their grammars, which are compiled where needed.

    Args:
      config: configuration of the target.
      requests: requests returned by `check_batch`.
      grammars: one grammar for all rows, or one per row; None leaves a row unconstrained.
      tokenizer: tokenizer from `load_tokenizer`, to compile a `Grammar`; may be None for compiled
        grammars.

    Raises:
      InputError: a grammar cannot be used, or there is no tokenizer to compile it with.
    """
    rows = len(requests)
    compilers: dict[tuple[int, ...], GrammarCompiler] = {}
    held = []
    own = per_row(cast(Any, grammars), rows, "grammars")
    for row, (request, grammar) in enumerate(zip(requests, own, strict=True)):
        if isinstance(grammar, Grammar):
            backend = getattr(tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise InputError(
                    "A Grammar is compiled with a tokenizer, and none is given; give "
                    "tokenizer=load_tokenizer(target) as well."
                )
            stops = request.stop_tokens or ()
            if stops not in compilers:
                compilers[stops] = GrammarCompiler(backend, config.vocab_size, stops)
            grammar = compilers[stops].compile(grammar)
        elif not isinstance(grammar, CompiledGrammar | None):
            name = of_row("grammars", row, rows)
            raise InputError(f"{name} is {grammar!r:.40}; give a Grammar, or None.")
        if grammar is not None:
            check_grammar(config, grammar, request.sampling, request.stop_tokens or ())
        held.append(request._replace(grammar=grammar))
    return held


def check_grammar(
    config: TargetConfig, grammar: CompiledGrammar, sampling: SamplingConfig, stops: Sequence[int]
) -> None:
    """Check that a grammar fits the target and the other settings of a request.

    Args:
      config: configuration of the target.
      grammar: the grammar.
      sampling: sampling settings of the request.
      stops: stop tokens of the request.

    Raises:
      InputError: the grammar is for another vocabulary; `stops` lacks an end token of the grammar;
        or the sampling settings have `min_tokens`.
    """
    if grammar.vocab_size != config.vocab_size:
        raise InputError(
            f"The request's grammar is over {grammar.vocab_size} tokens, but the target has "
            f"{config.vocab_size}; compile the grammar with the target's tokenizer."
        )
    if not grammar.end_tokens <= set(stops):
        raise InputError(
            "The request has a grammar, but its stop tokens lack some tokens that end the text of "
            "the grammar; leave the stop tokens out of the request."
        )
    if sampling.min_tokens:
        raise InputError(
            f"min_tokens is {sampling.min_tokens}, but the request has a grammar, which alone "
            "decides where the text ends; leave min_tokens out."
        )


def step_in_two(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    rows: Mapping[int, Row],
    batch: Any,
    controls: Any,
    masks: Int[np.ndarray, "G words"],
    *,
    tree: TreeConfig | None,
    top: int | None,
) -> tuple[DecodeState, tuple[Gains, Bool[Array, " G"]]]:
    """Run one step of a batch in which some rows have grammars, as two programs.

    The first program drafts the trees. Then the host computes masks of the tokens that the grammars
    allow after each node. The second program verifies the trees with these masks.

    Args:
      target: the target model.
      drafter: the drafter.
      state: decode state of B rows, donated.
      rows: the scheduler's rows that decode, by place in the batch.
      batch: index in the state of the row at each place (`rows` of `decode_rows`), on the mesh.
      controls: controls of the rows, as in `decode_rows`, on the mesh.
      masks: bit masks of the tokens that grammars allow after each row's root.
      tree: the shape of the trees; with None, a tree is only the root.
      top: number of most likely tokens to report per position, as in `read_rows`.
    """
    mesh, V = target.mesh, target.config.vocab_size
    # A single forced token needs no extra node: the drafter finds it by the mask.
    most = longest_path(tree) - 1
    forced = _forced_tokens(rows, len(masks), most if most > 1 else 0)
    asked = batch, controls
    drafted = propose_rows(target, drafter, state, *asked, *place((masks, forced), mesh), tree=tree)
    tokens, parents = to_host((drafted.tokens, drafted.parents))
    allowed: Any = place(_node_masks(rows, tokens, parents, V), mesh)
    return decide_rows(target, drafter, state, *asked, drafted, allowed, tree=tree, top=top)


@partial(jax.jit, static_argnames="tree")
@per_shard
def propose_rows(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    rows: Int[Array, " G"],
    controls: Controls | None,
    masks: Int[Array, "G words"],
    forced: Int[Array, "G F"],
    *,
    tree: TreeConfig | None,
) -> TokenTree:
    """Propose the trees of the next step for some rows.

    Args:
      target: the target model.
      drafter: the drafter; the masks apply to its scores right after the roots.
      state: decode state of B rows, not donated.
      rows: index in the state of the row at each place, as in `decode_rows`.
      controls: controls of the G rows, as in `decode_rows`.
      masks: bit masks of the tokens allowed after each root.
      forced: the next F tokens that the grammar forces after each root, padded with -1; they become
        nodes of the tree. F is less than P, and 0 if a tree is only the root.
      tree: the shape of the trees; with None, a tree is only the root.
    """
    decoder, V = target.merge(), target.config.vocab_size
    batch = with_controls(_batch_of(state, rows), controls, V)
    allowed = unpack_bits(masks[:, None], V)
    batch = batch._replace(sampling=batch.sampling._replace(allowed=allowed))
    noise = step_noise(batch, longest_path(tree), V)
    drafted = propose(decoder, drafter, as_asked(batch), noise, tree)
    count = forced.shape[1]
    if not count:
        return drafted
    chain = chain_tree(batch.root, forced, jnp.ones(len(rows), bool))
    chain = pad_nodes(chain, chain.tokens >= 0)
    merged = merge_trees(drafted, chain, count)
    # Forced nodes have a source of their own, whose index follows those of `SOURCES`.
    added = jnp.arange(merged.tokens.shape[1]) >= drafted.tokens.shape[1]
    origin = jnp.where(added & (merged.origin >= 0), len(SOURCES), merged.origin)
    merged = merged._replace(origin=origin)
    return pad_nodes(merged, batch.speculates[:, None] | (merged.depth == 0))


@partial(jax.jit, donate_argnames="state", static_argnames=("tree", "top"))
@per_shard
def decide_rows(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    rows: Int[Array, " G"],
    controls: Controls | None,
    drafted: TokenTree,
    masks: Int[Array, "G N words"],
    *,
    tree: TreeConfig | None,
    top: int | None = None,
) -> tuple[DecodeState, tuple[Gains, Bool[Array, " G"]]]:
    """Verify proposed trees and finish their step, as `decode_rows` does for one step.

    Args:
      target: the target model.
      drafter: the drafter.
      state: decode state of B rows, unchanged since the proposal, donated.
      rows: index in the state of the row at each place, as in `decode_rows`.
      controls: controls of the G rows, as in `decode_rows`.
      drafted: the proposed trees.
      masks: bit masks of the tokens allowed after each node.
      tree: the shape of the proposed trees.
      top: number of most likely tokens to report per position, as in `read_rows`.
    """
    decoder, V = target.merge(), target.config.vocab_size
    before, idle = _batch_of(state, rows), rows >= len(state.done)
    batch = with_controls(before, controls, V)
    batch = batch._replace(
        sampling=batch.sampling._replace(allowed=unpack_bits(masks, V)), done=before.done | idle
    )
    noise = step_noise(batch, longest_path(tree), V)
    after, trace, verified = decide_step(
        decoder, drafter, batch, as_asked(batch).cache, drafted, noise
    )
    gains = gains_of_step(~batch.done, trace, verified, V, top, sources=len(SOURCES) + 1)
    done = after.done
    after = after._replace(sampling=before.sampling, done=jnp.where(idle, before.done, done))
    state = after if len(rows) == len(state.done) else put_rows_back(state, after, rows)
    return state, (jax.tree.map(lambda leaf: leaf[:, None], gains), done)


def _batch_of(state: DecodeState, rows: Int[Array, " G"]) -> DecodeState:
    return state if len(rows) == len(state.done) else take_rows(state, rows)


def _forced_tokens(rows: Mapping[int, Row], count: int, most: int) -> Int[np.ndarray, "G F"]:
    """Find the tokens that grammars force after each text: up to F = `most`, padded with -1."""
    forced = np.full((count, most), -1, np.int32)
    for at, row in rows.items():
        tokens = [] if row.matcher is None or not most else row.matcher.forced(most)
        forced[at, : len(tokens)] = tokens
    return forced


def _node_masks(
    rows: Mapping[int, Row],
    tokens: Int[np.ndarray, "G N"],
    parents: Int[np.ndarray, "G N"],
    vocab_size: int,
) -> Int[np.ndarray, "G N words"]:
    """Return bit masks of the tokens allowed after each node of the rows' trees."""
    masks = np.full((*tokens.shape, -(-vocab_size // 32)), -1, np.int32)
    for at, row in rows.items():
        if row.matcher is not None:
            masks[at] = row.matcher.masks(tokens[at].tolist(), parents[at].tolist())
    return masks
