"""Lines of any content: each is a document or a counted skip, and healthy lines are kept."""

import json
import re
from pathlib import Path

from chat_folders import CONFIG, RECORDS, data_settings
from hypothesis import given
from hypothesis import strategies as st

from redrafter_jax.errors import InputError
from train.data.documents import load_documents

HEALTHY = [json.dumps(row).encode() for row in RECORDS.values()]
# The keys of all formats and of their turns.
KEYS = st.sampled_from([
    "messages", "role", "content", "conversations", "from", "value",
    "instruction", "input", "output", "text", "input_ids", "loss_mask",
])  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=[]))  # halves of surrogate pairs too
    | st.sampled_from(["user", "assistant", "human", "gpt"]),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(KEYS, part, max_size=3),
    max_leaves=12,
)
RECORDS_SPOILED = st.builds(
    lambda row, changes: json.dumps(row | changes).encode(),
    st.sampled_from(list(RECORDS.values())),
    st.dictionaries(KEYS, VALUES, min_size=1, max_size=2),
)
BYTES_SPOILED = st.builds(
    lambda line, place, junk: (line[:place] + junk + line[place + 1 :]).replace(b"\n", b" "),
    st.sampled_from(HEALTHY),
    st.integers(0, 80),
    st.binary(max_size=8),
)
LINES = st.lists(RECORDS_SPOILED | BYTES_SPOILED | st.just(b"[" * 50_000), min_size=1, max_size=4)


@given(LINES)
def test_spoiled_lines_are_counted_and_the_healthy_ones_kept(
    chat_target: Path, spoiled: list[bytes]
) -> None:
    path = chat_target / "rows.jsonl"
    path.write_bytes(b"\n".join([*HEALTHY, *spoiled, b""]))
    settings = data_settings({"files": [str(path)]}, chat_template="vicuna_v1.1")
    try:
        (source,) = load_documents(settings, chat_target, CONFIG)
    except InputError as error:
        # The one fault of a line that stops a run.
        if not re.search(rf"{path}, line \d+ holds token .* outside the vocabulary", str(error)):
            raise
        return
    assert len(source.documents) + len(source.skips) == len(HEALTHY) + len(spoiled)
    assert len(source.documents) >= len(HEALTHY)
    assert len({skip.place for skip in source.skips}) == len(source.skips)
