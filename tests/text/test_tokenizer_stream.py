"""Text from tokens that hold parts of characters, and where a stop string cuts it."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from redrafter_jax import InputError
from redrafter_jax.text.tokenizer import TextStream


def byte_level() -> Tokenizer:
    """Tokens of one byte to three, such as the end of a character and the start of the next."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # "ð", "Ł", "ĺ", "Ģ" are the bytes of the emoji F0 9F 98 80.
    merges = [("ð", "Ł"), ("ĺ", "Ģ"), ("Ģ", "ð"), ("a", "ð"), ("Ġ", "b"), ("Ġb", "a")]
    vocabulary = {token: i for i, token in enumerate([*sorted(alphabet), *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2's: what is outside its vocabulary becomes bytes, a run of which decodes as one."""
    merges = [("▁", "a"), ("a", "b")]
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "a", "b", "é", "▁a", "ab"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


TOKENIZERS = {"bytes": byte_level(), "byte_fallback": byte_fallback()}


def pieces_of(stream: TextStream, tokens: list[int]) -> list[str]:
    """The text that every token releases, and then what was held back."""
    pieces = [*map(stream.push, tokens), stream.finish()]
    assert stream.finish() == "", "nothing is released twice"
    return pieces


def after_prompt(tokenizer: Tokenizer, tokens: list[int], prompt: int) -> str:
    """The whole text without the characters that are complete within the prompt."""
    whole = tokenizer.decode(tokens)
    starts = (tokenizer.decode(tokens[:count]).rstrip("\ufffd") for count in range(prompt + 1))
    return whole[max(len(start) for start in starts if whole.startswith(start)) :]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_the_pieces_are_the_whole_text_after_any_prompt(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    alphabet = st.sampled_from("ab é😀👍日本\x00") | st.characters(
        exclude_categories=["Cs"], exclude_characters="\ufffd"
    )
    text = data.draw(st.text(alphabet, max_size=12))
    tokens = tokenizer.encode(text).ids
    prompt = data.draw(st.integers(0, len(tokens)))
    expected = after_prompt(tokenizer, tokens, prompt)
    pieces = pieces_of(TextStream(tokenizer.decode, tokens[:prompt]), tokens[prompt:])
    assert "".join(pieces) == expected
    assert pieces[-1] == "", "complete characters are not held back"


@given(st.lists(st.integers(0, 255), max_size=20))
def test_bytes_that_are_no_text_arrive_as_the_tokenizer_decodes_them(tokens: list[int]) -> None:
    tokenizer = TOKENIZERS["bytes"]
    stream = TextStream(tokenizer.decode, tokenizer.encode("abc").ids)
    assert "".join(map(stream.push, tokens)) + stream.finish() == tokenizer.decode(tokens)


def test_a_space_that_starts_a_word_is_kept_and_special_tokens_are_left_out() -> None:
    tokenizer = Tokenizer(models.BPE({"▁a": 0, "▁b": 1, "c": 2, "</s>": 3}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    stream = TextStream(tokenizer.decode, [0])
    assert [stream.push(token) for token in (1, 2, 3, 1, 3)] == [" b", "c", "", " b", ""]
    assert stream.finish() == ""


def test_a_space_that_begins_a_text_is_not_lost_behind_a_prompt_that_spells_nothing() -> None:
    tokenizer = Tokenizer(models.BPE({"▁": 0, "▁a": 1, "<s>": 2}, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    stream = TextStream(tokenizer.decode, [2])
    assert "".join(map(stream.push, [0, 1])) + stream.finish() == tokenizer.decode([2, 0, 1])


def test_tokens_that_spell_nothing_are_not_decoded_again_and_again() -> None:
    lengths = []

    def detokenize(tokens: list[int]) -> str:
        lengths.append(len(tokens))
        return "a" * tokens.count(1)

    stream = TextStream(detokenize, [1, 1])
    assert "".join(stream.push(token) for token in [0] * 50 + [1]) == "a"
    assert max(lengths) <= 4


@pytest.mark.parametrize(
    ("prompt", "pushed", "expected"),
    [
        ("", "😀😀", ["", "", "", "😀", "", "", "", "😀", ""]),
        ("👍", "日本", ["", "", "日", "", "", "本", ""]),
        # What was whole is shown; a character that never becomes whole is replaced at its end.
        ("", "😀|F0|9F", ["", "", "", "😀", "", "", "\ufffd\ufffd"]),
        ("👍|F0", "9F|98|80", ["", "", "😀", ""]),
        ("👍|F0", "a", ["a", ""]),
        ("", "😀|F0|9F|▁a|b", ["", "", "", "😀", "", "", "\ufffd\ufffd a", "b", ""]),
        # Four bytes that are no character: the first of them will not become one.
        ("a", "F0|F0|F0|F0|F0", ["", "", "", "\ufffd", "\ufffd", "\ufffd" * 3]),
    ],
)
def test_characters_in_a_run_of_bytes_are_shown_when_they_are_complete(
    prompt: str, pushed: str, expected: list[str]
) -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    vocabulary = tokenizer.get_vocab()

    def tokens_of(spelled: str) -> list[int]:
        """Bytes in hexadecimal, tokens of the vocabulary, or characters as their bytes."""
        names: list[str] = []
        for part in filter(None, spelled.split("|")):
            if part in ("a", "b", "▁a"):
                names.append(part)
            else:
                content = bytes.fromhex(part) if part.isascii() else part.encode()
                names += [f"<0x{byte:02X}>" for byte in content]
        return [vocabulary[name] for name in names]

    stream = TextStream(tokenizer.decode, tokens_of(prompt))
    assert pieces_of(stream, tokens_of(pushed)) == expected


def test_text_that_changes_as_more_follows_is_refused_not_garbled() -> None:
    def clean_up(tokens: list[int]) -> str:
        return "".join(["x", " ", ".", "y"][token] for token in tokens).replace(" .", ".")

    stream = TextStream(clean_up, [0])
    assert stream.push(1) == " "
    with pytest.raises(
        InputError, match=r"^detokenize changes the text ' ' when further tokens follow"
    ):
        stream.push(2)


def test_a_stop_string_ends_the_row_though_half_a_character_follows_it() -> None:
    spellings = [b"a", b"STOP\xe2", b"\x82", b"\xac", b"b"]

    def detokenize(tokens: list[int]) -> str:
        return b"".join(spellings[token] for token in tokens).decode(errors="replace")

    stream = TextStream(detokenize, [0], ["STOP"])
    assert (stream.push(0), stream.push(1), stream.stopped) == ("a", "", True)
    stream = TextStream(detokenize, [0], ["STOPX"])
    assert [stream.push(token) for token in (0, 1, 2, 3)] == ["a", "", "", "STOP€"]


# Tokens of several characters.
WORDS = ["a", "b", "ab", "ba", "aab", "é", "bé"]


def spell(tokens: list[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


def first_stop(text: str, stops: list[str]) -> int | None:
    """Where the stop string begins that is completed first, the longest of several: by scanning."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@given(
    st.lists(st.integers(0, len(WORDS) - 1), max_size=12),
    st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
)
@example([1, 2], ["bab", "a"])  # one token completes both, and the one that begins later first
def test_text_is_cut_where_the_first_completed_stop_string_begins(
    tokens: list[int], stops: list[str]
) -> None:
    text, expected_end = spell(tokens), first_stop(spell(tokens), stops)
    stream = TextStream(spell, [0], stops)
    shown, used = "", 0
    for token in tokens:
        shown += stream.push(token)
        used += 1
        assert text.startswith(shown)
        if stream.stopped:
            break
        # What is held back is the beginning of a stop string, no more.
        held = spell(tokens[:used])[len(shown) :]
        assert not held or any(len(held) < len(stop) and stop.startswith(held) for stop in stops)
    if expected_end is None:
        assert not stream.stopped
        assert shown + stream.finish() == text
    else:
        assert stream.stopped
        assert shown == text[:expected_end]
        # Not a token more than the stop string took.
        assert first_stop(spell(tokens[: used - 1]), stops) is None
