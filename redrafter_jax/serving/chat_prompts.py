"""Tokenizes the turns and tools of a chat request with the chat template."""

from typing import Any

from redrafter_jax.errors import InputError
from redrafter_jax.serving.openai_errors import ApiError
from redrafter_jax.serving.openai_schema import ChatRequest
from redrafter_jax.serving.service import ServedModel, Service
from redrafter_jax.text.chat_template import NO_TEMPLATE
from redrafter_jax.text.tool_styles import STYLES


def encode_chat(service: Service, request: ChatRequest) -> list[list[int]]:
    """Tokenize the messages of a chat request; return a list with one prompt, as token ids.

    Raises:
      ApiError: there is no chat template, or it does not support a part of the request.
    """
    model = service.model
    if model.format.template is NO_TEMPLATE:
        raise ApiError(400, f"{model.name} has no chat template; send the text to /v1/completions.")
    template, arguments = model.format.template, request.chat_template_kwargs
    turns = [turn.turn for turn in request.messages]
    if not template.thinks and any("reasoning_content" in turn for turn in turns):
        raise ApiError(
            400,
            f"The chat template of {model.name} does not support reasoning; leave "
            "reasoning_content out.",
            field="messages",
        )
    _check_tools(model, request, turns)
    try:
        template.check_arguments(arguments)
    except InputError as error:
        raise ApiError(400, str(error), field="chat_template_kwargs") from None
    opening = [] if turns[0]["role"] == "system" else model.format.opening
    tools = [tool.model_dump(exclude_unset=True) for tool in request.offered]
    try:
        return [model.format.encode([*opening, *turns], arguments, tools)]
    except InputError as error:
        raise ApiError(400, str(error), field="messages") from None


def _check_tools(model: ServedModel, request: ChatRequest, turns: list[dict[str, Any]]) -> None:
    """Refuse tools if the template cannot write them, or if the format of tool calls is unknown."""
    of_tools = any(turn["role"] == "tool" or "tool_calls" in turn for turn in turns)
    for field, given in (("tools", request.offered), ("messages", of_tools)):
        if given and not model.format.template.tools:
            raise ApiError(
                400,
                f"The chat template of {model.name} does not support tools; leave tools, calls of "
                "tools and their results out, or start the server with another --chat-template.",
                field=field,
            )
    if request.offered and model.tools is None:
        styles = ", ".join(STYLES)
        raise ApiError(
            400,
            f"The chat template of {model.name} does not show how answers call tools; start the "
            f"server with --tool-parser and one of {styles}.",
            field="tools",
        )
