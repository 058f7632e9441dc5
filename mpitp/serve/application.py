"""The whole application in front of a service: paths, limits, and the shield around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpitp.data.token_bytes import TokenBytes
from mpitp.data.tokenizer import Tokenizer
from mpitp.serve.api import Door, make_app
from mpitp.serve.asking import Asker, AskLimits, ServedModel
from mpitp.serve.chat import chat_template
from mpitp.serve.grammar import Forms
from mpitp.serve.metrics import metrics_of_texts
from mpitp.serve.service import Service
from mpitp.serve.shield import Shield, ShieldSettings

MOST_TEXTS = 64  # of one request


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """`tokens`: new ones of a text; `texts`: under way or waiting; `seconds`: of a request."""

    tokens: int = 4096
    texts: int = 128
    seconds: float = 600.0


def make_application(
    service: Service,
    tokenizer: Tokenizer,
    name: str,
    limits: ServerLimits,
    shield: ShieldSettings,
    log: Callable[[str], None],
) -> Shield:
    """An ASGI application that serves the service's model as `name`. Raises FileError for a template that is none."""
    model = service.engine.executor.model
    config, ends = model.config, frozenset(model.config.eos_ids)
    forms = Forms(tokenizer, config.vocab_size, ends)
    facts = (config.cached_positions, config.vocab_size, ends)
    served = ServedModel(name, tokenizer, TokenBytes(tokenizer), chat_template(tokenizer), forms, *facts)
    asker = Asker(served, AskLimits(limits.tokens, min(limits.texts, MOST_TEXTS)), service)
    num_ranks = service.engine.executor.channel.world.size
    return Shield(make_app(Door(service, asker, metrics_of_texts(service, num_ranks), limits.seconds)), shield, log)
