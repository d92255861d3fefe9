"""`generate --prompts`: continues every prompt of a file in batches, as JSON lines."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redrafter_jax.acceptance import acceptance_length
from redrafter_jax.command_line import make_folder_of
from redrafter_jax.commands.option_groups import config_of, option_of
from redrafter_jax.commands.options import dtype_of, open_decoder, read_schema
from redrafter_jax.commands.speed import describe_acceptance
from redrafter_jax.commands.terminal import log
from redrafter_jax.config import SamplingConfig
from redrafter_jax.engine.requests import Batch, check_batch
from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import open_target
from redrafter_jax.streaming import KeptCache, Update
from redrafter_jax.text.prompts import Prompt, read_prompts

_BATCH_SIZE = 8
# Decode steps between two updates of the stream, which are not shown.
_STEPS_PER_UPDATE = 16
# The options that decide the text of a row, besides its prompt, its seed and the sampling.
_TEMPLATE = ("chat", "chat_template", "template_arguments", "system")
_DECIDING = ("target", "max_new_tokens", "stop", "ignore_eos", "regex", *_TEMPLATE)
# Values of options that rows of older runs do not state.
_UNSTATED = asdict(SamplingConfig()) | {"ignore_eos": False}


def continue_file(arguments: argparse.Namespace) -> None:
    """Append a row, a JSON line, to the output for each prompt that has no row yet.

    A row holds the `prompt` with its `id` and `seed`, the `text` and its `tokens`, the number of
    target calls after prefill (`steps`), the `acceptance_length`, `ended_by` ("stop_token",
    "stop_string" or "max_new_tokens"), and the `options` that determine the text. Progress goes to
    stderr.

    Raises:
      InputError: a value or a file cannot be used, or the output holds rows of other prompts or
        options.
    """
    output, limit = arguments.output, arguments.max_new_tokens
    if output is None:
        raise InputError("--prompts needs --output, the file to write the continuations to.")
    if output.resolve() == arguments.prompts.resolve():
        raise InputError(
            f"--output is {output}, which is the file of --prompts; name another file."
        )
    prompts = read_prompts(arguments.prompts)
    last_seed = 2**31 - len(prompts)
    if not 0 <= arguments.seed <= last_seed:  # refuse now rather than in the last batch
        raise InputError(
            f"--seed is {arguments.seed}, but for {len(prompts)} prompts it must be from 0 to "
            f"{last_seed}, because prompt i is decoded with this seed plus i."
        )
    seeds = range(arguments.seed, arguments.seed + len(prompts))
    sampling = config_of(SamplingConfig, arguments)
    options = {name: getattr(arguments, name) for name in _DECIDING} | asdict(sampling)
    options["dtype"] = dtype_of(arguments)
    options["json_schema"] = read_schema(arguments)
    options = json.loads(json.dumps(options))  # as rows state them
    make_folder_of(output, "--output")
    done = _rows_written(output, prompts, seeds, options)
    if done == len(prompts):
        log(f"{output} already has the rows of all {done} prompts.")
        return
    size = min(arguments.batch_size or _BATCH_SIZE, len(prompts) - done)
    files = open_target(arguments.target)
    decoder = open_decoder(arguments, files, [prompt.text for prompt in prompts], size)
    rows = [decoder.format.encode_text(prompt.text) for prompt in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        try:
            check_batch(decoder.target.config, Batch([row], limit, sampling))
        except InputError as error:
            raise InputError(f"{prompt.place}: {error}") from None
    # With one cache size every batch runs the programs that the first batch compiled.
    kept_cache = KeptCache(max(map(len, rows)) + limit)
    # Python turns bytes of an option that are not UTF-8 into lone surrogates, which are written as
    # JSON escapes.
    with output.open("a", encoding="utf-8", errors="backslashreplace") as file:
        for first in range(done, len(rows), size):
            started, batch = time.perf_counter(), range(first, min(first + size, len(rows)))
            # Pad the last batch with rows that end at once.
            indices = [*batch, *[batch[-1]] * (size - len(batch))]
            texts, update = [""] * size, None
            for update in decoder.stream(
                [rows[index] for index in indices],
                [limit] * len(batch) + [max(1, sampling.min_tokens)] * (size - len(batch)),
                [seeds[index] for index in indices],
                steps_per_yield=decoder.steps_per_update(_STEPS_PER_UPDATE),
                kept_cache=kept_cache,
            ):
                texts = [text + new for text, new in zip(texts, update.texts, strict=True)]
            assert update is not None, "a stream yields the tokens of prefill at least"
            result = update.generation
            for row, index in enumerate(batch):
                record = {
                    "id": prompts[index].name,
                    "prompt": prompts[index].text,
                    "seed": seeds[index],
                    "text": texts[row].removeprefix(decoder.format.template.gap),
                    "tokens": result.tokens[row],
                    "steps": result.steps[row],
                    "acceptance_length": round(acceptance_length(result.accept_counts[row]), 4),
                    "ended_by": _ending(update, row, decoder.format.stop_tokens),
                    "options": options,
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            decided = sum(len(result.tokens[row]) for row in range(len(batch)))
            speed = decided / (time.perf_counter() - started)
            log(
                f"{batch[-1] + 1} of {len(rows)} prompts, {speed:.1f} tokens/s, "
                f"{describe_acceptance(result, len(batch))}"
            )


def _ending(last: Update, row: int, stop_tokens: Sequence[int]) -> str:
    if last.stopped[row]:
        return "stop_string"
    ended = last.generation.tokens[row][-1] in stop_tokens
    return "stop_token" if ended else "max_new_tokens"


def _rows_written(
    output: Path, prompts: Sequence[Prompt], seeds: Sequence[int], options: dict[str, Any]
) -> int:
    """Count the rows that an earlier run wrote; an incomplete last row is removed.

    Raises:
      InputError: the file holds rows of other prompts, seeds or options, or lines of another form.
    """
    if not output.exists():
        return 0
    written = output.read_bytes()
    whole = written[: written.rfind(b"\n") + 1]
    lines = whole.splitlines()
    for number, (line, prompt, seed) in enumerate(zip(lines, prompts, seeds, strict=False), 1):
        try:
            row = json.loads(line)
            ours = (prompt.name, prompt.text, seed)
            same = (row["id"], row["prompt"], row["seed"]) == ours
            before = dict(row["options"])
        except (ValueError, TypeError, KeyError, RecursionError):
            same, before = False, {}
        if not same:
            raise InputError(
                f"{output}, line {number} is not the row of {prompt.place} with seed {seed}; give "
                "another --output, or the --prompts and --seed that the file was started with."
            )
        changed = [
            f"{option_of(name)} {before.get(name)!r} (now {value!r})"
            for name, value in options.items()
            if before.get(name, _UNSTATED.get(name)) != value
        ]
        if changed:
            raise InputError(
                f"{output}, line {number} was decoded with {', '.join(changed)}; give another "
                "--output, or the options that the file was started with."
            )
    if len(lines) > len(prompts):
        raise InputError(
            f"{output} has {len(lines)} rows, more than the {len(prompts)} prompts; give another "
            "--output."
        )
    if whole != written:
        with output.open("r+b") as file:
            file.truncate(len(whole))
    return len(lines)
