"""What the HTTP interface is given: the parts of the process that its routes stand on, and its own settings."""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from runtime.errors import ConfigError
from runtime.serving.frontend.answer_cache import PromptAnswers
from runtime.serving.frontend.catalogue import Catalogue
from runtime.serving.frontend.engine import Engine
from runtime.serving.frontend.searches import SearchSource
from runtime.serving.frontend.tokenize import Tokens


class MetricsSource(Protocol):
    """Where /metrics comes from."""

    def metrics_text(self) -> Awaitable[str]:
        """All metrics, in Prometheus' text format."""


@dataclass(frozen=True, slots=True)
class Service:
    """What the routes stand on."""

    link: Engine
    search: SearchSource
    metrics: MetricsSource
    answers: PromptAnswers | None = None
    tokens: Tokens | None = None  # of the model that the node itself runs
    catalogue: Catalogue | None = None  # None on a node without collections


@dataclass(frozen=True, slots=True)
class Settings:
    """The HTTP interface's own settings: names, keys, limits, default deadlines.

    `model` is "" on a node that only searches; `collections` gives each collection's dimension, 0 while it is unknown.
    A prompt's bytes count its text as UTF-8. `open_paths` need no key; without keys a request's Host must be loopback's
    or `host`. Browsers let pages from `cors_origins` ask. A body that names no limit gets `default_max_tokens` (a chat)
    or OpenAI's 16 (a completion).
    Raises ConfigError for a key that no header could carry, or that an empty one would.
    """

    model: str = ""
    collections: Mapping[str, int] = field(default_factory=dict)
    host: str = "127.0.0.1"
    api_keys: tuple[str, ...] = ()
    open_paths: tuple[str, ...] = ("/health", "/metrics")
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 1 << 20
    max_prompt_bytes: int = 256 << 10
    max_k: int = 64
    max_probe_tokens: int = 192
    max_searches: int = 64
    default_max_tokens: int = 256
    request_timeout_s: float = 300.0
    search_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    context_tokens: int = 0  # told with the model; 0: not known

    def __post_init__(self) -> None:
        for position, key in enumerate(self.api_keys):
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                # Not shown: it may be all but the secret.
                raise ConfigError(f"API key {position} is empty, or has blanks around it or characters beyond ASCII")


def missing_roles(service: Service, settings: Settings) -> list[str]:
    """The roles without a worker that takes requests; empty when the node is ready."""
    workers = service.link.missing() if settings.model else []
    return [*workers, *service.search.missing()]
