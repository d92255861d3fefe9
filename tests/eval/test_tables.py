"""The page, CSV and LaTeX of `eval compare`, as their readers read them."""

import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest
from pylatexenc import latex2text
from pylatexenc.latexwalker import (
    LatexCharsNode,
    LatexGroupNode,
    LatexMacroNode,
    LatexSpecialsNode,
    LatexWalker,
    get_default_latex_context_db,
)
from pylatexenc.macrospec import std_macro

from eval.compare import training_seeds
from eval.tables import as_csv, as_latex, page, screen


def measures(speedup: float | None, identical: float = 1.0) -> dict[str, Any]:
    ends = None if speedup is None else [speedup - 0.1, speedup + 0.1]
    return {
        "tokens_per_second": speedup and 40.0,
        "speedup": speedup,
        "speedup_quartiles": ends,
        "speedup_interval": ends,
        "decode_only": {"speedup": speedup, "milliseconds_per_target_call": speedup and 3.5},
        "acceptance_length": 3.0,
        "acceptance_interval": [2.5, 3.5],
        "acceptance_rate_per_depth": [0.75, None],
        "calls_per_depth": [8, 0, 0],
        "accepted_by": {"recurrent": 4, "lookup": 12},
        "target_calls": 8,
        "identical": identical,
        "drafted_per_step": 6,
        "bytes_per_step": 2_500_000,
    }


def report_of(speedup: float | None = 1.25) -> dict[str, Any]:
    """One sampling of two prompts, on the second of which the texts differ."""
    baseline = speedup and 1.0
    odd = {"prompts": 1, "methods": {"head_50%": measures(speedup, 0.0)}}
    even = {"prompts": 1, "methods": {"head_50%": measures(speedup)}}
    tree = {"beam_width": 2, "draft_rounds": 3}
    case = {
        "described": "T 0.7, top_k 5",
        "ways": {
            "baseline": {"drafter": None, "tree": None},
            "head_50%": {"drafter": "runs/a/drafter", "tree": tree},
        },
        "methods": {"baseline": measures(baseline), "head_50%": measures(speedup, 0.5)},
        "categories": {"even": even, "odd": odd},
        "prompts": [
            {
                "category": category,
                "methods": {
                    "baseline": measures(baseline),
                    "head_50%": measures(speedup, identical),
                },
            }
            for category, identical in (("even", 1.0), ("odd", 0.0))
        ],
        "verdict": {"sentence": "Faster, by a little."},
    }
    return {
        "samplings": [case],
        "batch_size": 1,
        "training_seeds": {"runs/a/drafter": 7},
        "versions": {"python": "3.12.1", "jax": "0.11.2", "flax": None},
        "device": "a CPU",
        "timestamp": "2026-11-27T01:02:03+00:00",
        "config": {
            "target": "models/t",
            "dtype": "float32",
            "clock": speedup is not None,
            "max_new_tokens": 32,
            "repeats": 1,
        },
    }


RULES = ("toprule", "midrule", "bottomrule")
# Of which pylatexenc knows no text, or a similar one.
CHARACTERS = {"textasciicircum": "^", "textless": "<", "textgreater": ">"}


def as_text(nodes: Any) -> str:
    """What these parsed nodes are set as."""
    for node in nodes:
        if isinstance(node, LatexCharsNode):
            # In a text LaTeX sets none of these, or another character in its place.
            assert not {*node.chars} & {*"%$#_^~<>"}
        elif isinstance(node, LatexGroupNode):
            as_text(node.nodelist)
        else:
            assert node.isNodeType(LatexMacroNode)
    spelt = latex2text.get_default_latex_context_db()
    macros = [latex2text.MacroTextSpec(name, character) for name, character in CHARACTERS.items()]
    spelt.add_context_category("characters", macros=macros, prepend=True)
    setter = latex2text.LatexNodes2Text(latex_context=spelt, strict_latex_spaces=True)
    return setter.nodelist_to_text(nodes).strip()


def read_tabular(latex: str) -> list[list[str]]:
    """The cells of every row, as pylatexenc parses them; one over all columns is a row of one.

    It stops at braces that do not match.
    """
    # They would belong to the end of the row: LaTeX looks beyond spaces, which pylatexenc does not.
    assert not re.search(r"\\\\\s*[\[*]", latex)
    known = get_default_latex_context_db()
    macros = [std_macro("multicolumn", "{{{"), *(std_macro(name, "") for name in RULES)]
    known.add_context_category("tables", macros=macros, prepend=True)
    walker = LatexWalker(latex, latex_context=known, tolerant_parsing=False)
    comment, tabular, end = walker.get_latex_nodes()[0]
    assert (comment.comment, end.chars) == (r" \usepackage{booktabs}", "\n")
    assert tabular.environmentname == "tabular"
    width = len(tabular.nodeargd.argnlist[0].nodelist[0].chars)
    rows: list[list[str]] = []
    cells: list[list[Any]] = [[]]
    for node in tabular.nodelist:
        name = node.macroname if node.isNodeType(LatexMacroNode) else None
        if name in RULES:
            assert (len(cells), as_text(cells[0])) == (1, ""), "rules stand between rows"
        elif name == "\\":
            rows.append([as_text(cell) for cell in cells])
            cells = [[]]
        elif node.isNodeType(LatexSpecialsNode) and node.specials_chars == "&":
            cells.append([])
        elif name == "multicolumn":
            columns, _, text = node.nodeargd.argnlist
            assert columns.nodelist[0].chars == str(width)
            cells[-1] += text.nodelist
        else:
            cells[-1].append(node)
    assert (len(cells), as_text(cells[0])) == (1, "")
    assert {len(row) for row in rows} == {1, width}
    return rows


def test_csv_and_latex_say_what_the_page_says() -> None:
    report = report_of()
    rows = list(csv.DictReader(io.StringIO(as_csv(report))))
    names = [(row["category"], row["method"]) for row in rows]
    assert names == [("", "baseline"), ("", "head_50%"), ("even", "head_50%"), ("odd", "head_50%")]
    head = rows[1]
    assert (head["sampling"], head["prompts"]) == ("T 0.7, top_k 5", "2")
    assert (float(head["speedup_low"]), float(head["speedup_high"])) == (1.15, 1.35)
    assert float(head["milliseconds_per_token"]) == 25.0

    latex = as_latex(report)
    columns, sampling, _, row = read_tabular(latex)
    assert columns == ["", "tokens/s", "ms/token", "speed-up", "decode only", "acceptance"]
    assert sampling == ["T 0.7, top_k 5"]
    assert row == ["head_50%", "40.0", "25.00", "1.25 [1.15, 1.35]", "1.25", "3.00 [2.50, 3.50]"]
    assert r"head\_50\% & 40.0 & 25.00 & 1.25 [1.15, 1.35] & 1.25 & 3.00 [2.50, 3.50]" in latex

    text = page(report, "models/t", {"T 0.7, top_k 5": ["answers of 9 tokens"]})
    assert "| head_50% | 40.0 | 25.00 | 3.50 | 1.25 [1.15, 1.35] | 1.25 | 3.00 [2.50," in text
    assert "| 0.75 (0 of 8) | recurrent 0.50, lookup 1.50 | 6 | 2.5 | 8 | 1 of 2 |" in text
    assert "| odd | head_50% | 1 | 1.25 | 1.15 to 1.35 |" in text
    assert "| head_50% | runs/a/drafter | 7 | W=2 R=3 N=7 |" in text
    for words in ("prefill", "a CPU", "python 3.12.1, jax 0.11.2; 2026-11-27T01:02:03", "batch 1"):
        assert words in text
    assert "answers of 9 tokens\n\nFaster, by a little.\n" in text


def test_a_screen_has_a_line_of_rates_and_times_for_each_method() -> None:
    lines = [one for one in screen(report_of()) if isinstance(one, str)]
    rates = "; accepted at depth 1, 2, ...: 0.75 (0 of 8)"
    assert lines == [f"{name}: 3.50 ms per target call{rates}" for name in ("baseline", "head_50%")]


def test_without_the_clock_a_page_has_no_speeds() -> None:
    text = page(report_of(None), "models/t", {"T 0.7, top_k 5": []})
    assert "| head_50% | 2 | 3.00 | 0.75 (0 of 8) | recurrent 0.50, lookup 1.50 | 6 | 2.5 |" in text
    assert "tokens/s" not in text
    assert "no clock; a CPU" in text


# Such a name begins with what would belong to the end of the row before.
@pytest.mark.parametrize("name", [r"[a]*_50% & {#1} $x^2~\y <z>", "*", "head, N=9"])
def test_latex_reads_back_as_the_names_of_all_methods(name: str) -> None:
    report = report_of()
    (case,) = report["samplings"]
    case["described"] = name
    for part in (case, *case["prompts"]):
        part["methods"] = {"baseline": measures(1.0), name: measures(1.25)}
    _, sampling, _, row = read_tabular(as_latex(report))
    assert (sampling, row[0]) == ([name], name)


def test_the_seed_of_a_head_is_that_of_the_run_beside_it(tmp_path: Path) -> None:
    for name, text in (("one", "seed: 3"), ("two", "steps: 1"), ("three", "[1]")):
        (tmp_path / name / "drafter").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(text)
    (tmp_path / "four").mkdir()
    drafters = [str(tmp_path / name / "drafter") for name in ("one", "two", "three", "four")]
    assert training_seeds(drafters) == {drafters[0]: 3}
