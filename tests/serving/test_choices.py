"""From the engine's tokens to the text of an answer."""

import pytest
from tiny_folders import byte_tokenizer
from tokenizers import AddedToken

from redrafter_jax.serving.choices import Choice
from redrafter_jax.serving.messages import Event, Token


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("stop", [[], ["c"]])
def test_what_ends_an_answer_is_no_part_of_it(special: bool, stop: list[str]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=special)])
    ids = tokenizer.encode("ab<|im_end|>").ids
    choice = Choice(tokenizer, [0], stop)
    decided = [Token(id, -0.5, [], call, None) for call, id in enumerate(ids)]
    piece = choice.take(Event(0, decided, "stop"))
    assert (piece.text, piece.finish) == ("ab", "stop")
    assert [token.text for token in piece.tokens] == ["a", "b", ""]
