"""What `generate` takes and returns beside arrays: stop tokens, conversations, texts."""

from typing import Any

import pytest
from small_batch import DRAFT, MIXED, PROMPTS
from tiny_folders import character_tokenizer, encode
from tiny_folders import decode as spell
from tiny_models import PARITY_CONFIG, tiny_config
from transformers import PreTrainedTokenizerFast

from redrafter_jax import InputError, generate, generate_autoregressive, stream
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")

V = PARITY_CONFIG.vocab_size


def cut(text: list[int], stops: list[int]) -> list[int]:
    end = next((end for end, token in enumerate(text, start=1) if token in stops), len(text))
    return text[:end]


def test_a_row_ends_with_the_first_of_its_own_stop_tokens_wherever_that_falls(
    habitual_target: Target, good_drafter: LoadedHead
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 24, "sampling": MIXED, "tree": DRAFT}
    plain = generate_autoregressive(
        habitual_target, PROMPTS, max_new_tokens=24, sampling=MIXED, eos_token_ids=()
    )
    # Lengths of row 1's text after each call: a stop token between two of them was accepted
    # together with tokens that must not be said.
    calls = stream(habitual_target, good_drafter, PROMPTS, eos_token_ids=(), **options)
    ends = {len(one.generation.tokens[1]) for one in calls}
    inside = 0
    for stop in range(V):
        stops = [[stop, (stop + 5) % V], [stop], [], [(stop + 1) % V]]
        expected = [cut(row, own) for row, own in zip(plain.tokens, stops, strict=True)]
        result = generate(habitual_target, good_drafter, PROMPTS, eos_token_ids=stops, **options)
        assert result.tokens == expected
        assert result.log_probs is None, "nobody asked for them"
        inside += len(expected[1]) < 24 and len(expected[1]) not in ends
    assert inside > 0


def test_stop_tokens_are_the_targets_own_unless_given(habitual_target: Target) -> None:
    plain = generate_autoregressive(habitual_target, PROMPTS, max_new_tokens=24)
    stops = [plain.tokens[0][3], plain.tokens[1][5]]
    config = tiny_config(eos_token_ids=tuple(stops))
    stopping = Target(config, habitual_target.graphdef, habitual_target.params)
    result = generate_autoregressive(stopping, PROMPTS, max_new_tokens=24)
    assert result.tokens == [cut(row, stops) for row in plain.tokens]
    free = generate_autoregressive(stopping, PROMPTS, max_new_tokens=24, eos_token_ids=())
    assert free.tokens == plain.tokens


def line_tokenizer(template: str | None = None, end: str = "w") -> Any:
    """Of transformers: a token per character, and every turn a line that closes with the end."""
    lines = "{% for turn in messages %}{{ turn.content }}{{ eos_token }}\n{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=character_tokenizer(), eos_token=end, chat_template=template or lines
    )


TURNS = [{"role": "user", "content": "abc"}]


def test_conversations_and_texts_are_prompts_with_a_tokenizer(
    habitual_target: Target, good_drafter: LoadedHead
) -> None:
    pair = habitual_target, good_drafter
    said = generate_autoregressive(habitual_target, [encode("ab")], max_new_tokens=24)
    end = spell(said.tokens[0][7:8])
    tokenizer, ends = line_tokenizer(end=end), encode(end)
    options: dict[str, Any] = {"max_new_tokens": 24, "tree": DRAFT, "tokenizer": tokenizer}
    rows = [encode(f"abc{end}\n"), encode("ab"), [3, 1, 4]]
    plain = generate(*pair, rows, max_new_tokens=24, tree=DRAFT, eos_token_ids=ends)
    assert plain.texts is None
    result = generate(*pair, [TURNS, "ab", [3, 1, 4]], **options)
    assert result.tokens == plain.tokens
    texts = [spell([token for token in row if token not in ends]) for row in plain.tokens]
    assert result.texts == texts
    assert any(row[-1] in ends for row in plain.tokens), "an end is seen"
    # One conversation, or one text, is a batch of one.
    for prompt, row in ((TURNS, 0), ("ab", 1)):
        assert generate(*pair, prompt, **options).texts == texts[row : row + 1]
        *_, last = stream(*pair, prompt, **options)
        assert last.generation.texts == texts[row : row + 1]
    # Given ends hold.
    free = generate(*pair, [TURNS], eos_token_ids=(), **options)
    assert len(free.tokens[0]) == 24
    assert free.texts == [spell(free.tokens[0])]


@pytest.mark.parametrize(
    ("prompts", "tokenizer", "sentence"),
    [
        (TURNS, None, r"which only a tokenizer can read; give tokenizer=load_tokenizer\(target\)"),
        (["ab"], None, r"which only a tokenizer can read; give tokenizer=load_tokenizer\(target\)"),
        (TURNS, "gpt2", "tokenizer is 'gpt2'; give what load_tokenizer returns"),
        (TURNS, line_tokenizer("{{ raise_exception('no') }}"), "refuses the turns: no"),
        (TURNS, line_tokenizer("{% if %}"), "is not valid Jinja at line 1"),
        ([TURNS, 3], line_tokenizer(), "Prompt 1 is 3; prompts are lists of token ids"),
    ],
)
def test_what_cannot_be_written_is_refused(
    habitual_target: Target, prompts: Any, tokenizer: Any, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        generate(habitual_target, None, prompts, max_new_tokens=2, tokenizer=tokenizer)


def test_a_tokenizer_without_a_template_continues_texts_alone(habitual_target: Target) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=character_tokenizer())
    options: dict[str, Any] = {"max_new_tokens": 2, "tokenizer": tokenizer}
    assert generate(habitual_target, None, "ab", **options).texts is not None
    with pytest.raises(InputError, match=r"no chat template; set tokenizer\.chat_template"):
        generate(habitual_target, None, TURNS, **options)


def test_end_tokens_that_the_target_cannot_write_end_nothing(habitual_target: Target) -> None:
    options: dict[str, Any] = {"max_new_tokens": 4}
    tokenizer = line_tokenizer(end="[END]")  # the token after the target's last one
    assert tokenizer.eos_token_id == habitual_target.config.vocab_size
    written = generate(habitual_target, None, "ab", tokenizer=tokenizer, **options)
    assert written.tokens == generate(habitual_target, None, [encode("ab")], **options).tokens
    # The template closes answers with it too.
    template = "{% for turn in messages %}{{ turn.content }}{% if turn.role != 'user' %}"
    template += "{{ eos_token }}{% endif %}{% endfor %}"
    tokenizer = line_tokenizer(template, end="[END]")
    told = generate(habitual_target, None, TURNS, tokenizer=tokenizer, **options)
    assert told.tokens == generate(habitual_target, None, [encode("abc")], **options).tokens
