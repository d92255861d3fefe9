"""The routes `/tokenize` and `/detokenize`, as in vLLM."""

import asyncio
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field, field_validator

from redrafter_jax.serving.chat_prompts import encode_chat
from redrafter_jax.serving.openai_errors import ApiError, check_model
from redrafter_jax.serving.openai_fields import Fields, Text, Values
from redrafter_jax.serving.openai_messages import Message, Tool
from redrafter_jax.serving.openai_schema import ChatRequest
from redrafter_jax.serving.service import Service
from redrafter_jax.text.tokenizer import encode


class TokenizeRequest(Fields):
    """The body of `/tokenize`.

    Attributes:
      model: name of the model in /v1/models; optional.
      messages: conversation to tokenize, as for `/v1/chat/completions`.
      tools: tools, as for `/v1/chat/completions`.
      chat_template_kwargs: arguments of the chat template, as for `/v1/chat/completions`.
      prompt: text to tokenize instead of a conversation, as for `/v1/completions`.
      add_special_tokens: whether the tokenizer adds its special tokens to a text.
      return_token_strs: whether to return the vocabulary entry of each token as well.
    """

    off: ClassVar[Values] = {
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
    }

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: list[Tool] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    prompt: Annotated[Text | None, Field(validate_default=True)] = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @field_validator("prompt")
    @classmethod
    def _check_one(cls, prompt: str | None, others: Any) -> str | None:
        if "messages" in others.data and (prompt is None) == (others.data["messages"] is None):
            raise ValueError("give either a prompt or messages")
        return prompt


class DetokenizeRequest(Fields):
    """The body of `/detokenize`.

    Attributes:
      model: name of the model in /v1/models; optional.
      tokens: token ids.
    """

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


def token_routes(service: Service) -> APIRouter:
    """Return the routes `/tokenize` and `/detokenize` for a served model."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> dict[str, Any]:
        check_model(service.model.name, request.model)
        tokens = await asyncio.to_thread(_encode, service, request)
        told = {"count": len(tokens), "max_model_len": service.model.context_length}
        entries = map(service.model.format.tokenizer.id_to_token, tokens)
        return told | {
            "tokens": tokens,
            "token_strs": list(entries) if request.return_token_strs else None,
        }

    @router.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> dict[str, Any]:
        check_model(service.model.name, request.model)
        tokenizer = service.model.format.tokenizer
        for token in request.tokens:
            if token >= 2**32 or tokenizer.id_to_token(token) is None:
                raise ApiError(
                    400,
                    f"{token} is not a token id of {service.model.name}, which has "
                    f"{tokenizer.get_vocab_size()} tokens; leave it out.",
                    field="tokens",
                )
        text = await asyncio.to_thread(tokenizer.decode, request.tokens, skip_special_tokens=False)
        return {"prompt": text}

    return router


def _encode(service: Service, request: TokenizeRequest) -> list[int]:
    if request.messages is None:
        tokenizer, text = service.model.format.tokenizer, request.prompt or ""
        return encode(tokenizer, text, add_special_tokens=request.add_special_tokens)
    chat = ChatRequest.model_construct(
        messages=request.messages,
        tools=request.tools,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    (tokens,) = encode_chat(service, chat)
    return tokens
