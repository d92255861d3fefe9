"""The settings of `python -m eval`: what is accepted, and how everything else is refused."""

import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml
from places import CONFIGS

from eval.__main__ import main
from eval.config import EvalSettings, TreeGrid
from redrafter_jax import DraftConfig, SamplingConfig
from redrafter_jax.settings.files import load_settings

VALID: dict[str, Any] = {
    "target": "models/target",
    "drafter": "models/drafter",
    "prompts": "prompts.jsonl",
    "max_new_tokens": 32,
    "draft": {"beam_width": 2, "draft_rounds": 3},
    "report_dir": "runs/report",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "eval.yaml"
    path.write_text(yaml.safe_dump(VALID))
    return path


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `python -m eval ...`."""
    monkeypatch.setattr(sys, "argv", ["eval", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        main()
    assert isinstance(exit.value.code, int)
    return exit.value.code


@pytest.fixture
def refusal(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """What stderr says when the valid file is run with these overrides."""

    def run(*overrides: str) -> str:
        assert run_main(monkeypatch, "--config", config, *overrides) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "Traceback" not in printed.err
        return printed.err

    return run


def test_what_a_file_leaves_out_has_the_librarys_defaults(config: Path) -> None:
    settings = load_settings(EvalSettings, config)
    assert settings.draft == DraftConfig(beam_width=2, draft_rounds=3)
    assert settings.sampling == SamplingConfig()
    assert (settings.warm_ups, settings.batch_size, settings.stop) == (3, 1, "eos")
    assert settings.prompt_count is None


def test_every_draft_and_sampling_value_reaches_the_library(config: Path) -> None:
    draft: dict[str, Any] = {
        "beam_width": 5,
        "draft_rounds": 2,
        "num_nodes": 11,
        "final_beams_only": True,
        "sharpness": 1.5,
        "candidates": 6,
        "lookup_tokens": 3,
    }
    sampling: dict[str, Any] = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05}
    overrides = [f"draft.{name}={value}" for name, value in draft.items()]
    overrides += [f"sampling.{name}={value}" for name, value in sampling.items()]
    settings = load_settings(EvalSettings, config, overrides)
    assert settings.draft == DraftConfig(**draft)
    assert settings.sampling == SamplingConfig(**sampling)


def test_a_grid_has_every_tree_of_its_lists() -> None:
    grid = TreeGrid(
        beam_width=2, draft_rounds=3, num_nodes=[4, None], sharpness=[1.5], lookup_tokens=[0, 2]
    )
    assert grid.build() == [
        DraftConfig(2, 3, 4, sharpness=1.5),
        DraftConfig(2, 3, None, sharpness=1.5),
        DraftConfig(2, 3, 4, sharpness=1.5, lookup_tokens=2),
        DraftConfig(2, 3, None, sharpness=1.5, lookup_tokens=2),
    ]
    with pytest.raises(pydantic.ValidationError, match=r"num_nodes is 2; .* give 3 to 9 nodes"):
        TreeGrid(beam_width=2, draft_rounds=3, num_nodes=[2], lookup_tokens=[2])


def test_texts_end_at_the_targets_end_token_unless_told_never_to(config: Path) -> None:
    assert load_settings(EvalSettings, config).eos_token_ids is None
    assert load_settings(EvalSettings, config, ["stop=never"]).eos_token_ids == ()


def test_the_demos_settings_are_valid() -> None:
    settings = load_settings(EvalSettings, CONFIGS / "demo_eval.yaml")
    assert settings.prompts.name == "demo_prompts.jsonl"
    assert settings.report_dir == Path("runs/demo")


def test_an_unknown_key_is_refused_with_the_nearest_known_one(refusal: Any) -> None:
    assert "draft.beam_widht: unknown key; did you mean 'beam_width'?" in refusal(
        "draft.beam_widht=4"
    )


def test_all_problems_are_listed_at_once(refusal: Any) -> None:
    message = refusal(
        "repeat=2", "batch_size=0", "draft.num_nodes=9", "sampling.top_p=1.5", "dtype=float16"
    )
    for problem in (
        "repeat: unknown key; did you mean 'repeats'?",
        "batch_size: Input should be greater than 0 (got 0)",
        "draft.num_nodes is 9; beam_width=2 and draft_rounds=3 give 1 to 7",
        "sampling.top_p: Input should be less than or equal to 1 (got 1.5)",
        "dtype: Input should be 'float32' or 'bfloat16' (got 'float16')",
    ):
        assert f"\n  {problem}" in message


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("sampling.temperature=-0.1", "greater than or equal to 0"),
        ("sampling.temperature=.inf", "finite number"),
        ("sampling.top_k=0", "greater than 0"),
        ("sampling.top_p=0", "greater than 0"),
        ("sampling.min_p=1.1", "less than or equal to 1"),
        ("sampling={temperature: 0, top_k: 5, min_p: 0.1}", "or leave top_k and min_p out"),
        ("draft.sharpness=0", "greater than 0"),
        ("draft.draft_rounds=none", "valid integer"),
        ("first_seed=-1", "greater than or equal to 0"),
        ("warm_ups=0", "greater than 0"),
        ("stop=sometimes", "'eos' or 'never'"),
        ("max_new_tokens=null", "valid integer"),
    ],
)
def test_a_bad_value_is_refused_with_its_path_and_limit(
    refusal: Any, override: str, reason: str
) -> None:
    message = refusal(override)
    assert f"\n  {override.partition('=')[0]}: " in message
    assert reason in message


def test_a_budget_fits_into_the_whole_beam_trace(config: Path, refusal: Any) -> None:
    assert load_settings(EvalSettings, config, ["draft.num_nodes=7"]).draft.num_nodes == 7
    assert "draft_rounds=3 give 1 to 7 nodes.\n" in refusal("draft.num_nodes=8")


def test_a_missing_key_is_named_without_the_rest_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "eval.yaml"
    path.write_text(yaml.safe_dump({name: VALID[name] for name in VALID if name != "drafter"}))
    assert run_main(monkeypatch, "--config", path) == 2
    expected = f"error: {path} is not a valid configuration:\n  drafter: Field required\n"
    assert capsys.readouterr().err == expected


def test_print_config_shows_the_resolved_whole_and_runs_nothing(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_main(monkeypatch, "--config", config, "repeats=9", "--print-config")
    assert code == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["repeats"] == 9
    assert shown["draft"]["sharpness"] == 1.0
    assert EvalSettings.model_validate(shown) == load_settings(EvalSettings, config, ["repeats=9"])
