"""Measures throughput by number of concurrent requests (streams), with and without trees.

python -m tools.streams TARGET DRAFTER --prompts configs/smollm2_135m/mixed_prompts.jsonl

Speeds are relative to the baseline, which decodes without a drafter. With --json-schema, every
method also decodes answers that follow the schema, in the same turns.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from redrafter_jax import load_drafter, load_target, load_tokenizer, load_tree_table
from redrafter_jax.config import Grammar, SamplingConfig, TreeConfig
from redrafter_jax.drafters.base import Drafter, LoadedHead
from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Request
from redrafter_jax.engine.requests import tokenize
from redrafter_jax.files.tree_table import TreeTable
from redrafter_jax.models.target import Target
from redrafter_jax.progress import track
from redrafter_jax.text.grammars import CompiledGrammar, GrammarCompiler
from redrafter_jax.text.prompts import read_prompts
from redrafter_jax.verdict import describe_tree

_CONTEXT_LENGTH = 512


def main() -> None:
    """Measure, and print a line for each number of streams and each method."""
    arguments = _arguments()
    target = load_target(arguments.target, dtype="float32")
    drafter = load_drafter(arguments.drafter, target=target)
    table = load_tree_table(arguments.drafter)
    trees = list(dict.fromkeys(tuned.tree for tuned in table.trees if tuned.tree))
    # The same trees with a shared budget of two nodes per row on average.
    shared = [replace(tree, mean_nodes=2) for tree in trees if tree.budget > 2]
    asked = [
        [{"role": "user", "content": prompt.turns[0]}]
        for prompt in read_prompts(arguments.prompts, arguments.count)
    ]
    tokenizer = load_tokenizer(arguments.target)
    prompts = tokenize(target.config, asked, tokenizer, None).prompts
    grammars: dict[str, CompiledGrammar | None] = {"": None}
    if arguments.json_schema:
        stops = target.config.eos_token_ids
        compiler = GrammarCompiler(tokenizer.backend_tokenizer, target.config.vocab_size, stops)
        schema = Grammar(json_schema=json.loads(arguments.json_schema.read_text()))
        grammars[", by the schema"] = compiler.compile(schema)
    if len(prompts) < (most := max(arguments.streams)):
        raise SystemExit(
            f"error: {arguments.prompts} has {len(prompts)} prompts, but {most} streams need "
            f"{most}; give more prompts or fewer streams."
        )
    for streams in arguments.streams:
        ways: dict[str, Engine] = {"baseline": _engine(target, None, None, streams)}
        ways["adaptive"] = _engine(target, drafter, table, streams)
        for tree in [*trees, *(shared if streams > 1 else [])]:
            ways[describe_tree(tree)] = _engine(target, drafter, tree, streams)
        rates: dict[str, list[float]] = {name + held: [] for name in ways for held in grammars}
        if arguments.json_schema:
            for engine in ways.values():  # programs with grammars compile when they first run
                _rate(engine, prompts, streams, arguments, [*grammars.values()][-1])
        for turn in track(range(arguments.turns), arguments.turns, f"{streams} streams"):
            order = list(ways) if turn % 2 else list(reversed(ways))
            for name in order:
                for held, grammar in grammars.items():
                    rate = _rate(ways[name], prompts, streams, arguments, grammar)
                    rates[name + held].append(rate)
        for name, own in rates.items():
            ratios = [one / base for one, base in zip(own, rates["baseline"], strict=True)]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(
                f"{streams:3} streams, {name}: {median(own):.1f} tokens/s, "
                f"{median(ratios):.2f} of the baseline ({spread})",
                flush=True,
            )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", help="folder or GGUF file of the target")
    parser.add_argument("drafter", help="folder of a head with a tree table")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines")
    parser.add_argument("--count", type=int, default=16, help="number of prompts (%(default)s)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=64, help="per answer (%(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="runs of each method (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="%(default)s")
    parser.add_argument("--json-schema", type=Path, help="file with a JSON schema")
    return parser.parse_args()


def _engine(
    target: Target,
    drafter: LoadedHead | Drafter | None,
    tree: TreeConfig | TreeTable | None,
    streams: int,
) -> Engine:
    engine = Engine(
        target, drafter, tree=tree, slots=streams, context_length=_CONTEXT_LENGTH, row_counts=()
    )
    engine.warm_up()
    return engine


def _rate(
    engine: Engine,
    prompts: Sequence[list[int]],
    streams: int,
    arguments: argparse.Namespace,
    grammar: CompiledGrammar | None,
) -> float:
    """Return the new tokens per second for one prompt per stream, but at least four prompts."""
    chosen = prompts[: max(streams, 4)]
    sampling = SamplingConfig(arguments.temperature)
    tokens, began = 0, time.perf_counter()
    # A grammar ends a text at the target's end tokens; other texts have no end.
    stops = tuple(grammar.end_tokens) if grammar else ()
    for seed, prompt in enumerate(chosen):
        engine.submit(Request(prompt, arguments.tokens, seed, sampling, stops, grammar=grammar))
    while engine.busy:
        tokens += sum(len(event.decided) for event in engine.advance())
    return tokens / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
