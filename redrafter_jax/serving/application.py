"""All parts of a server, put together around an engine."""

from redrafter_jax.serving.choices import token_texts
from redrafter_jax.serving.engine import Engine
from redrafter_jax.serving.guard import Guard
from redrafter_jax.serving.metrics import Metrics
from redrafter_jax.serving.openai_api import make_app
from redrafter_jax.serving.server import LOOPBACK, Server
from redrafter_jax.serving.service import Limits, Model, Service
from redrafter_jax.serving.worker import Worker


def make_server(
    engine: Engine,
    model: Model,
    limits: Limits,
    *,
    host: str = LOOPBACK[0],
    api_key: str | None = None,
    log_prompts: bool = False,
) -> Server:
    """The server, which warms the engine up when it runs.

    Args:
      engine: that decodes.
      model: what is served.
      limits: on requests.
      host: the address that it will listen on; on the loopback it answers to no other name.
      api_key: that requests must bear; None for none.
      log_prompts: whether the log tells what was asked.
    """
    metrics = Metrics(engine)
    worker = Worker(engine, failed=lambda: server.fail(), waited=metrics.queue.observe)
    service = Service(worker, model, limits, token_texts(model.tokenizer), metrics)
    guarded = Guard(
        make_app(service, log_prompts=log_prompts),
        api_key=api_key,
        hosts=LOOPBACK if host in LOOPBACK else None,
        max_body=limits.body,
        refused=metrics.count_refusal,
    )
    server = Server(guarded, worker, limits.drain)
    return server
