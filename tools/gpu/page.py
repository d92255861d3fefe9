"""The Markdown page of results, with a table of medians for each piece."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from redrafter_jax.errors import InputError

Record = Mapping[str, Any]


def check_one_card(records: Mapping[str, Record]) -> None:
    """Refuse records of different GPUs, which must not share a page."""
    cards = {record["device"]: name for name, record in records.items()}
    if len(cards) > 1:
        (one, first), (other, second) = list(cards.items())[:2]
        raise InputError(
            f"{first} was measured on {one!r} and {second} on {other!r}; give another --output, or "
            "empty its folder."
        )


def markdown(records: Mapping[str, Record], left_out: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of the page; `left_out` has the reason for each missing piece."""
    first = next(iter(records.values()))
    versions = ", ".join(f"{name} {number}" for name, number in first["versions"].items() if number)
    yield f"# {first['device']}, {first['timestamp'].partition('T')[0]}\n"
    yield f"Written by `make gpu`; {versions}. Medians; the JSON file beside it has all values."
    if wrong := _wrong(records):
        yield f"\n**Wrong: {wrong}.**"
    for name, record in records.items():
        if name.startswith(("step_", "parts_", "rows_", "trees_")):
            rows, title = _steps(record), f"{name}: a decode step, milliseconds"
        elif name.startswith(("attention_", "products")):
            rows, title = (
                _bench(record),
                f"{name}: microseconds, share of a copy's rate, difference",
            )
        else:
            title, make = _TABLES[name]
            rows = make(record)
        yield f"\n## {title}\n"
        yield from _table(list(rows))
    yield "\n## Time and memory\n"
    yield from _table(
        [["piece", "seconds", "GB of the card at most"]]
        + [[name, _number(one.get("seconds"), ".0f"), _peak(one)] for name, one in records.items()]
    )
    for name, reason in left_out.items():
        yield f"\n{name} is left out: {reason}."


def _wrong(records: Mapping[str, Record]) -> str:
    rows = records.get("kernels", {}).get("rows", [])
    names = [f"{row['kernel']} of {row['shape']}" for row in rows if not row["right"]]
    names += [
        f"{row['texts'] - row['identical']} of {row['texts']} texts in float32, {row['sampling']}"
        for row in records.get("texts", {}).get("rows", [])
        if row["dtype"] == "float32" and row["identical"] < row["texts"]
    ]
    if records.get("checks", {}).get("exit_code", 0):
        names.append(f"tests: {records['checks']['said']}")
    return "; ".join(names)


def _kernels(record: Record) -> Iterator[list[str]]:
    yield ["kernel", "shape", "difference", "at most", "right"]
    for row in record["rows"]:
        found = row.get("not_run") or _number(row.get("difference"), ".1e")
        right = "yes" if row["right"] else "NO"
        yield [row["kernel"], row["shape"], found, f"{row['largest']:.0e}", right]


def _copy(record: Record) -> Iterator[list[str]]:
    rates = record["gigabytes_per_second"]
    yield ["lowest", "median", "highest"]
    yield [f"{rate:.0f}" for rate in (rates[0], median(rates), rates[-1])]


def _steps(record: Record) -> Iterator[list[str]]:
    rows = record["rows"]
    parts = list(rows[0]["milliseconds"])
    yield ["W", "R", "N", "B", "sampling", *parts, "step / baseline"]
    for row in rows:
        sizes = [str(row[n]) for n in ("beam_width", "draft_rounds", "num_nodes", "batch_size")]
        times = [f"{median(row['milliseconds'][part]):.3f}" for part in parts]
        yield [*sizes, row["sampling"], *times, f"{row['in_baseline_steps']:.2f}"]


def _acceptance(record: Record) -> Iterator[list[str]]:
    yield ["accepted depth", "tokens a step", "ms", "tokens/s", "speed-up"]
    for row in record["rows"]:
        depth = "baseline" if row["depth"] is None else str(row["depth"])
        numbers = row["acceptance_length"], median(row["milliseconds"]), row["tokens_per_second"]
        forms = ".2f", ".3f", ".1f"
        cells = [format(number, form) for number, form in zip(numbers, forms, strict=True)]
        yield [depth, *cells, f"{row['speedup']:.2f}"]


def _texts(record: Record) -> Iterator[list[str]]:
    yield ["dtype", "sampling", "identical", "acceptance length", "tokens/s", "speed-up"]
    for row in record["rows"]:
        same = f"{row['identical']} of {row['texts']}"
        numbers = row["acceptance_length"], row["tokens_per_second"], row["speedup"]
        cells = [format(number, ".2f") for number in numbers]
        yield [row["dtype"], row["sampling"], same, *cells]


def _bench(record: Record) -> Iterator[list[str]]:
    rows = record["rows"]
    names = list(rows[0]["candidates"])
    shape = [name for name in ("heads", "weights", "batch", "slots", "nodes") if name in rows[0]]
    yield [*shape, *names]
    for row in rows:
        yield [*(str(row[size]) for size in shape), *(_cell(row["candidates"][n]) for n in names)]


def _cell(one: Record) -> str:
    if "not_run" in one:
        return "not run"
    cell = f"{one['microseconds'][1]:.1f}, {one['share_of_copy'][1]:.2f}"
    if "difference" not in one:
        return cell
    return f"{cell}, {_number(one['difference'], '.1e')}"


def _checks(record: Record) -> Iterator[list[str]]:
    yield ["pytest -m gpu"]
    yield [record["said"]]


_TABLES = {
    "kernels": ("Kernels beside their references", _kernels),
    "copy": ("A copy, GB read and written per second", _copy),
    "acceptance": (
        "A step of Llama-3.1-8B's shape at each accepted depth, which is forced",
        _acceptance,
    ),
    "checks": ("Tests", _checks),
    "texts": ("Texts of SmolLM2-135M-Instruct, decoded with and without a drafter", _texts),
}


def _peak(record: Record) -> str:
    peak = record.get("peak_memory_bytes")
    return "not counted" if peak is None else f"{peak / 1e9:.1f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    head, *rest = rows
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rest:
        yield f"| {' | '.join(row)} |"
