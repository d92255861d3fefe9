"""`python -m train.regenerate --config configs/x.yaml`: training data in the target's own words.

A drafter guesses what the target writes, not what people wrote. This lets the target continue
pieces of its training text with our own decoder and keeps the continuations as token rows that
a source of a training config reads. A run that was stopped goes on after its last row,
if the rows are of the same prompts, seeds and temperatures; the weights that wrote them are not
known.
"""

import json
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int
from rich.console import Console
from rich.progress import track

from redrafter_jax.command_line import make_folder, parse_settings, run
from redrafter_jax.config import SamplingConfig
from redrafter_jax.decode import generate_autoregressive
from redrafter_jax.errors import InputError
from redrafter_jax.hub import load_target
from redrafter_jax.target import Target
from train.config import RegenerateSettings
from train.data.documents import load_documents
from train.data.rows import cut
from train.data.skips import describe_skips
from train.data.types import Windows


def choose_prompts(
    windows: Windows, prompt_tokens: int, count: int, seed: int
) -> Int[np.ndarray, "count prompt"]:
    """The beginnings of `count` windows that are full of text, none of them twice.

    Raises:
      InputError: there are fewer full windows.
    """
    full = np.flatnonzero(windows.loss_mask[:, 1:].all(axis=1))
    if len(full) < count:
        raise InputError(
            f"count is {count}, but the data gives {len(full)} full windows; lower it."
        )
    chosen = np.random.default_rng(seed).permutation(full)[:count]
    return windows.tokens[chosen, :prompt_tokens]


def continue_prompts(
    target: Target,
    prompts: Int[np.ndarray, "count prompt"],
    settings: RegenerateSettings,
    done: int,
) -> Iterator[list[str]]:
    """JSON rows of the continuations from number `done` on, a batch at a time."""
    new_tokens = settings.data.sequence_length - settings.prompt_tokens
    temperatures = settings.temperatures
    for start in range(done, settings.count, settings.batch_size):
        seeds = range(start, min(start + settings.batch_size, settings.count))
        batch = prompts[start : seeds.stop].tolist()
        result = generate_autoregressive(
            target,
            batch,
            max_new_tokens=new_tokens,
            sampling=[SamplingConfig(temperatures[seed % len(temperatures)]) for seed in seeds],
            seeds=seeds,
        )
        yield [
            json.dumps(
                {
                    "seed": seed,
                    "temperature": temperatures[seed % len(temperatures)],
                    "input_ids": prompt + tokens,
                    "loss_mask": [0] * len(prompt) + [1] * len(tokens),
                },
                separators=(",", ":"),
            )
            for seed, prompt, tokens in zip(seeds, batch, result.tokens, strict=True)
        ]


def count_rows(prompts: Int[np.ndarray, "count prompt"], settings: RegenerateSettings) -> int:
    """Rows of this run that the output holds already; a row cut short by a kill is removed.

    Raises:
      InputError: there are more than `count` rows, or one that these settings do not write.
    """
    path = settings.output
    if not path.is_file():
        return 0
    stored = path.read_bytes()
    whole = stored[: stored.rfind(b"\n") + 1]
    lines = whole.splitlines()
    if len(lines) > settings.count:
        raise InputError(
            f"count is {settings.count}, but {path} holds {len(lines)} rows already; raise it or "
            "use another output."
        )
    for seed, (line, prompt) in enumerate(zip(lines, prompts.tolist(), strict=False)):
        temperature = settings.temperatures[seed % len(settings.temperatures)]
        if not _is_row(line, seed, temperature, prompt):
            raise InputError(
                f"{path}, line {seed + 1} is no continuation of this run's prompt with seed {seed} "
                f"at temperature {temperature}; use another output or remove that one."
            )
    with path.open("r+b") as output:
        output.truncate(len(whole))
    return len(lines)


def _is_row(line: bytes, seed: int, temperature: float, prompt: list[int]) -> bool:
    try:
        row = json.loads(line)
        ids, mask = row["input_ids"], row["loss_mask"]
        written = len(ids) - len(prompt)
        return (
            (row["seed"], row["temperature"]) == (seed, temperature)
            and ids[: len(prompt)] == prompt
            and mask == [0] * len(prompt) + [1] * written
        )
    except (ValueError, KeyError, TypeError):
        return False


def main() -> None:
    """Continue the prompts and append the rows to the output, whole batches only."""
    settings = parse_settings(RegenerateSettings, "Continue training text with the target.")
    if settings.prompt_tokens >= settings.data.sequence_length:
        raise InputError(
            f"prompt_tokens is {settings.prompt_tokens}, which leaves nothing to write of "
            f"data.sequence_length={settings.data.sequence_length}."
        )
    make_folder(settings.output.parent, "the folder of output")
    target = load_target(settings.target, settings.target_dtype)
    sources = load_documents(settings.data, settings.target, target.config)
    console = Console(stderr=True)
    for source in sources:
        if source.skips:
            told = f"{source.name}: skipped {describe_skips(source.skips)}"
            console.print(told, markup=False, highlight=False, soft_wrap=True)
    documents = [document for source in sources for document in source.documents]
    windows = cut(documents, target.config.eos_token_ids[0], settings.data.sequence_length)
    prompts = choose_prompts(
        windows, settings.prompt_tokens, settings.count, settings.data.shuffle_seed
    )
    done = count_rows(prompts, settings)
    batches = -(-(settings.count - done) // settings.batch_size)
    rows = continue_prompts(target, prompts, settings, done)
    with settings.output.open("a", encoding="utf-8") as output:
        for batch in track(rows, "regenerate", batches, console=console):
            output.write("".join(f"{row}\n" for row in batch))
            output.flush()
            done += len(batch)
    console.print(f"{done} rows in {settings.output}")


if __name__ == "__main__":
    run(main)
