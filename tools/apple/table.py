"""The comparison as a table: one line per prompt and way of decoding, then the medians."""

from typing import Any

from rich.table import Table

from tools.apple.sides import MODES, Mode


def make_table(report: dict[str, Any], policy: str) -> Table:
    """One line per prompt and way of decoding, then the medians; of one wait policy."""
    settings, run = report["settings"], report["runs"][policy]
    table = Table(
        title=f"ours and Apple's, W={settings['beam_width']} R={settings['draft_rounds']}, "
        f"{settings['max_new_tokens']} new tokens, {report['device']}, "
        f"{report['threads']['cpus']} CPUs, load before {report['load_average_before']:.1f}, "
        f"OMP_WAIT_POLICY={policy}"
    )
    table.add_column("prompt")
    table.add_column("decoding", no_wrap=True)
    for name in ("same text", "calls ours", "calls Apple", "tok/s ours", "tok/s Apple", "ratio"):
        table.add_column(name, justify="right")
    for i, row in enumerate(run["prompts"]):
        for mode in MODES:
            result = row[mode]
            same = "yes" if result["same_text"] else f"to {result['first_difference']}"
            add_row(table, f"{i} ({row['prompt_tokens']})", mode, same, result, result["ratio"])
    table.add_section()
    for mode in MODES:
        total = run["summary"][mode]
        add_row(table, "all", mode, f"{total['same_text']:.0%}", total, total["median_ratio"])
    return table


def add_row(
    table: Table, prompt: str, mode: Mode, same: str, result: dict[str, Any], ratio: float
) -> None:
    """One line; `result` is a prompt's or the summary's."""
    calls, speeds = result["target_calls"], result["tokens_per_second"]
    cells = [
        prompt,
        "baseline" if mode == "autoregressive" else mode,
        same,
        str(calls["ours"]),
        str(calls["apple"]),
    ]
    table.add_row(*cells, f"{speeds['ours']:.1f}", f"{speeds['apple']:.1f}", f"{ratio:.2f}")
