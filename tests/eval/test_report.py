"""What reports look like on a screen."""

from io import StringIO

from rich.console import Console

from eval.report import make_table


def test_names_are_broken_before_a_number_is_cut() -> None:
    numbers = ["1.10", "1.04 to 1.23", "1.83", "0.13", "673.9", "24 of 24"]
    name = "the shipped head and prompt lookup, on all prompts"
    columns = ["method", "speedup", "quartiles", "acceptance", "lookup", "MB", "identical"]
    console = Console(width=80, file=StringIO())
    console.print(make_table("", columns, [[name, *numbers]]))
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    told = " ".join(" ".join(lines).split())
    assert all(cell in told for cell in [*columns, *numbers, *name.split()])
