"""Built-in chat formats as data: the text around the turns of a conversation."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer


class ChatFormat(NamedTuple):
    """A chat format; in its texts, `{}` stands for the text of a turn.

    Attributes:
      user: the text around a user turn.
      opening: the text that opens an answer.
      closing: the text that closes an answer.
      tokens: tokens that the tokenizer must have; the last one ends an answer.
      system: the text around a system turn. If it holds `{}` twice, it is the text around the
        system turn and the first user turn together.
      begin: the text before the first turn; None if the tokenizer must add its own special tokens.
      gap: text between the opening and an answer. The target writes this text itself in the answer
        that it generates; `render` writes it in earlier answers.
      strips: whether white space at the ends of turns is removed.
      default_system: the system turn if none is given.
    """

    user: str
    opening: str
    closing: str
    tokens: tuple[str, ...]
    system: str
    begin: str | None = ""
    gap: str = ""
    strips: bool = False
    default_system: str | None = None

    def render(self, turns: Sequence[dict[str, Any]], opens: bool) -> str:
        """The conversation as text; if `opens` is True, `opening` follows for the next answer.

        A system turn may come first.

        Raises:
          ValueError: the other turns do not alternate between user and assistant.
        """
        system, rest, text = self.default_system, turns, self.begin or ""
        if turns and turns[0]["role"] == "system":
            system, rest = turns[0]["content"], turns[1:]
        within = self.system.count("{}") == 2
        if system is not None and not within:
            text += self.system.format(self._own(system))
        for index, turn in enumerate(rest):
            due = ("user", "assistant")[index % 2]
            if turn["role"] != due:
                raise ValueError(
                    f"a turn has the role {turn['role']!r}, but the next role must be {due!r}"
                )
            said = self._own(turn["content"])
            if due == "assistant":
                text += f"{self.opening}{self.gap}{said}{self.closing}"
                continue
            if within and system is not None and index == 0:
                said = self.system.format(self._own(system), said)
            text += self.user.format(said)
        return text + self.opening if opens else text

    def missing(self, tokenizer: Tokenizer) -> list[str]:
        """The tokens that the format needs and the tokenizer lacks."""
        return [token for token in self.tokens if tokenizer.token_to_id(token) is None]

    def _own(self, text: str) -> str:
        return text.strip() if self.strips else text


FORMATS = {
    "chatml": ChatFormat(
        user="<|im_start|>user\n{}<|im_end|>\n",
        opening="<|im_start|>assistant\n",
        closing="<|im_end|>\n",
        tokens=("<|im_start|>", "<|im_end|>"),
        system="<|im_start|>system\n{}<|im_end|>\n",
    ),
    "gemma": ChatFormat(
        user="<start_of_turn>user\n{}<end_of_turn>\n",
        opening="<start_of_turn>model\n",
        closing="<end_of_turn>\n",
        tokens=("<bos>", "<start_of_turn>", "<end_of_turn>"),
        system="{}\n\n{}",
        begin="<bos>",
        strips=True,
    ),
    "llama2": ChatFormat(
        user="<s>[INST] {} [/INST]",
        opening="",
        closing=" </s>",
        tokens=("<s>", "</s>"),
        system="<<SYS>>\n{}\n<</SYS>>\n\n{}",
        gap=" ",
        strips=True,
    ),
    "llama3": ChatFormat(
        user="<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>",
        opening="<|start_header_id|>assistant<|end_header_id|>\n\n",
        closing="<|eot_id|>",
        tokens=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        system="<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
        begin="<|begin_of_text|>",
        strips=True,
    ),
    # "mistral" is for v0.3 and later, whose tokenizers have [INST] tokens. The format below is for
    # v0.1 and v0.2.
    "mistral": ChatFormat(
        user="[INST] {}[/INST]",
        opening="",
        closing="</s>",
        tokens=("<s>", "[INST]", "[/INST]", "</s>"),
        system="{}\n\n{}",
        begin="<s>",
        gap=" ",
    ),
    "mistral_v0.1": ChatFormat(
        user="[INST] {} [/INST]",
        opening="",
        closing="</s>",
        tokens=("<s>", "</s>"),
        system="{}\n\n{}",
        begin="<s>",
        gap=" ",
    ),
    "vicuna_v1.1": ChatFormat(
        user="USER: {} ",
        opening="ASSISTANT:",
        closing="</s>",
        tokens=("</s>",),
        system="{} ",
        begin=None,
        gap=" ",
        default_system="A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    ),
    "zephyr": ChatFormat(
        user="<|user|>\n{}</s>\n",
        opening="<|assistant|>\n",
        closing="</s>\n",
        tokens=("</s>",),
        system="<|system|>\n{}</s>\n",
    ),
}
