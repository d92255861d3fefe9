"""The model card of a head: the README.md in its folder, which the Hugging Face hub shows.

The format is https://huggingface.co/docs/hub/model-cards.
"""

import json
from pathlib import Path, PurePath
from typing import Any

import yaml

from redrafter_jax.drafters.kinds import KINDS
from redrafter_jax.files.fields import write_atomically
from redrafter_jax.files.locate import is_gguf
from redrafter_jax.files.publish import CARD, NOT_STATED

from .config import LOSSES, TrainSettings

# A card with this line is overwritten; users who edit the card remove the line.
_MARK = "<!-- Written with the head. Take this line out to keep your own words. -->"
# The value of `license` for a licence that is not in the hub's list.
_LICENCE = {"license": "other", "license_name": NOT_STATED}
# Placeholder in commands for a target that has no hub id.
_TARGET = "path/or/hub-id/of/the/target"


def write_card(settings: TrainSettings, report: Path | None = None) -> None:
    """Write the model card of an exported head.

    An existing card is overwritten only if it still has the line that marks it as generated.

    Args:
      settings: settings of the training run.
      report: path of a `compare.json` of `eval compare`; the card shows its figures. None: the card
        has no figures.
    """
    folder = settings.output_dir / "drafter"
    path = folder / CARD
    if path.exists() and _MARK not in path.read_text(encoding="utf-8"):
        return
    data = json.loads((settings.output_dir / "data.json").read_text(encoding="utf-8"))
    measured = None if report is None else json.loads(report.read_text(encoding="utf-8"))
    write_atomically(path, _card(settings, data, measured))


def _card(
    settings: TrainSettings, data: list[dict[str, Any]], report: dict[str, Any] | None
) -> str:
    given = str(settings.target)
    target = _public_name(given)
    head = yaml.safe_dump(_header(settings), sort_keys=False, allow_unicode=True)
    title = next(kind.title for kind in KINDS if kind.name == settings.drafter.kind)
    parts = [
        f"---\n{head}---",
        _MARK,
        f"# A draft head for {target}",
        f"{title[:1].upper()}{title[1:]}, for speculative decoding of `{target}` with "
        "redrafter-jax. The text is always the same as without a head; a better head only makes "
        "it faster.",
        "## Use",
        _use(_hub_id(given), target, settings.data.chat_template),
        "## Training",
        _training(settings, data),
        "## Figures",
        _figures(report) if report else _no_figures(_hub_id(given) or _TARGET),
        "## Licence",
        "Not stated yet: set `license` above. A head that was trained on a model's hidden states "
        "and words may be bound by that model's licence.",
    ]
    return "\n\n".join(parts) + "\n"


def _header(settings: TrainSettings) -> dict[str, Any]:
    sources = settings.data.sources
    hubs = [source.hub for source in sources if source.hub is not None]
    base = _hub_id(str(settings.target))
    return {
        **_LICENCE,
        **({"base_model": base} if base else {}),
        "library_name": "redrafter-jax",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", settings.drafter.kind],
        **({"datasets": hubs} if hubs else {}),
    }


def _hub_id(name: str) -> str | None:
    """The name if it is a hub id; None if it is a local path, whether or not the path exists."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if name.count("/") != 1 or Path(name).exists() or is_gguf(Path(name)):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _public_name(name: str) -> str:
    """A hub id, or the last part of a path, so that a card does not publish local folders."""
    return _hub_id(name) or PurePath(name).name


def _use(hub_id: str | None, name: str, template: str) -> str:
    """Commands and code that use the head, with the chat template that it was trained with."""
    target = hub_id or _TARGET
    # Of a template file only the name is published.
    shown = PurePath(template).name
    option = "" if template == "tokenizer" else f" --chat-template {shown}"
    note = (
        ""
        if template == "tokenizer"
        else f"\n\nThe head was trained with the chat template `{shown}`. For conversations in "
        "Python, set `tokenizer.chat_template` to its Jinja text first."
    )
    place = (
        ""
        if hub_id
        else f"The target was a folder or a file, `{name}`: put its path, or its id on the hub, in "
        f"place of `{target}`.\n\n"
    )
    return f"""{place}```bash
redrafter chat --target {target} --drafter path/or/hub-id/of/this/head{option}
redrafter serve --target {target} --drafter path/or/hub-id/of/this/head{option}
```

```python
from redrafter_jax import generate, load_drafter, load_target, load_tokenizer

target = load_target("{target}")
drafter = load_drafter("path/or/hub-id/of/this/head")
turns = [{{"role": "user", "content": "Hello"}}]
result = generate(target, drafter, turns, max_new_tokens=100, tokenizer=load_tokenizer(target))
```{note}"""


def _training(settings: TrainSettings, data: list[dict[str, Any]]) -> str:
    rows = [
        (
            _source_name(str(source["source"])),
            f"{source['records']:,}",
            f"{source['tokens']:,}",
            f"{source['learnt']:,}",
        )
        for source in data
    ]
    optimizer, data_settings = settings.optimizer, settings.data
    given = {name: getattr(settings.loss, name) for name in LOSSES}
    losses = ", ".join(f"{name} {weight:g}" for name, weight in given.items() if weight)
    positions = settings.steps * optimizer.rows_per_step * data_settings.sequence_length
    stated = {
        "steps": f"{settings.steps:,}",
        "rows of a step": f"{optimizer.rows_per_step}, of {data_settings.sequence_length} tokens",
        "positions, at most": f"{positions:,}",
        "draft rounds": str(settings.draft_rounds),
        "losses": losses,
        "optimizer": f"{optimizer.rule}, learning rate {optimizer.learning_rate:g}",
        "dtype of the target": settings.target_dtype,
    }
    return "\n\n".join(
        [
            _table(("data", "records", "tokens", "tokens that carry loss"), rows),
            _table(("setting", "value"), stated.items()),
            "`config.yaml` of the run has all settings; `redrafter-train --config config.yaml` "
            "repeats the run.",
        ]
    )


def _source_name(name: str) -> str:
    """Public name of a data source: the last part of its path, or its hub id."""
    place = name.partition(" (")[2].removesuffix(")") or name
    return _public_name(place.rpartition(", ")[2])


def _figures(report: dict[str, Any]) -> str:
    rows = []
    for case in report["samplings"]:
        groups = {"all": (len(case["prompts"]), case["methods"])} | {
            name: (group["prompts"], group["methods"]) for name, group in case["categories"].items()
        }
        for kind, (count, methods) in groups.items():
            for name, method in methods.items():
                if name == "baseline":
                    continue
                rows.append(
                    (
                        case["described"],
                        kind,
                        str(count),
                        name,
                        f"{method['acceptance_length']:.2f}",
                        _speed_up(method),
                    )
                )
    columns = ("sampling", "prompts", "count", "method", "tokens per target call")
    return "\n\n".join(
        [
            f"On {report['device']}, {report['config']['dtype']}, batch size "
            f"{report['batch_size']}; medians (quartiles), prefill included. Prompts that training "
            "did not read, by kind:",
            _table((*columns, "speed-up"), rows),
            "```bash\nredrafter-eval compare --config compare.yaml\n```",
            "`compare.yaml` names target, head, prompts and trees.",
        ]
    )


def _speed_up(method: dict[str, Any]) -> str:
    ends = method["speedup_quartiles"]
    return "" if ends is None else f"{method['speedup']:.2f} ({ends[0]:.2f} to {ends[1]:.2f})"


def _no_figures(target: str) -> str:
    return (
        "None yet. In a checkout of redrafter-jax, this command finds the fastest tree and "
        "measures it:\n\n```bash\n"
        f"redrafter-eval tune --config configs/tune.yaml target={target} "
        "drafter=path/of/this/head prompts=prompts.jsonl\n```"
    )


def _table(columns: tuple[str, ...], rows: Any) -> str:
    def line(cells: Any) -> str:
        return f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in cells)} |"

    return "\n".join([line(columns), "|" + "---|" * len(columns), *map(line, rows)])
