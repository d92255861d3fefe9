"""The prompt of a chat request: its turns and tools as the chat template writes them."""

from typing import Any

from redrafter_jax.errors import InputError
from redrafter_jax.serving.openai_errors import ApiError
from redrafter_jax.serving.openai_schema import ChatRequest
from redrafter_jax.serving.service import ServedModel, Service
from redrafter_jax.text.chat_template import NO_TEMPLATE
from redrafter_jax.text.tool_styles import STYLES


def encode_chat(service: Service, request: ChatRequest) -> list[list[int]]:
    """The token ids of the one prompt of a chat request.

    Raises:
      ApiError: the template does not write what it holds.
    """
    model = service.model
    if model.format.template is NO_TEMPLATE:
        raise ApiError(
            400, f"{model.name} has no chat template; ask /v1/completions to continue a text."
        )
    template, arguments = model.format.template, request.chat_template_kwargs
    turns = [turn.turn for turn in request.messages]
    if not template.thinks and any("reasoning_content" in turn for turn in turns):
        raise ApiError(
            400,
            f"The chat template of {model.name} knows no reasoning; leave reasoning_content out.",
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
    """Refuse tools that the chat template does not write, or whose calls could not be told."""
    of_tools = any(turn["role"] == "tool" or "tool_calls" in turn for turn in turns)
    for field, given in (("tools", request.offered), ("messages", of_tools)):
        if given and not model.format.template.tools:
            raise ApiError(
                400,
                f"The chat template of {model.name} writes no tools; leave them out, or start the "
                "server with one that does by --chat-template.",
                field=field,
            )
    if request.offered and model.tools is None:
        styles = ", ".join(STYLES)
        raise ApiError(
            400,
            f"How {model.name} calls tools cannot be told from its chat template; start the "
            f"server with --tool-parser and one of {styles}.",
            field="tools",
        )
