"""Decides which part answers which path, and who may call it."""

from __future__ import annotations

from dataclasses import dataclass

FRONTEND, CONTROL = "frontend", "control"


@dataclass(frozen=True, slots=True)
class Route:
    """One path, or all below it."""

    path: str
    to: str = FRONTEND
    below: bool = False
    """Whether everything below the path is meant, instead of the path alone."""
    is_public: bool = False
    """Whether it needs no key."""
    needs_admin: bool = False
    reads_body: bool = False
    """Whether a JSON body names a model and costs tokens."""
    only_stateless: bool = False
    """Whether it is for requests that need no history and keep nothing."""
    is_socket: bool = False
    """Whether it is a WebSocket."""


ROUTES = (
    Route("/live", is_public=True),
    Route("/health", is_public=True),
    Route("/v1/chat/completions", reads_body=True),
    Route("/v1/completions", reads_body=True),
    Route("/v1/messages", reads_body=True),
    Route("/v1/messages/count_tokens", reads_body=True),
    Route("/v1/embeddings", reads_body=True),
    Route("/v1/classify", reads_body=True),
    Route("/v1/pooling", reads_body=True),
    Route("/v1/rerank", reads_body=True),
    Route("/v1/images/generations", reads_body=True),
    Route("/v1/images/edits", reads_body=True),
    Route("/v1/videos", reads_body=True),
    Route("/v1/videos/stream", reads_body=True),
    Route("/v1/audio/speech", reads_body=True),
    Route("/v1/realtime", is_socket=True),
    Route("/v1/models"),
    Route("/v1/models/", below=True),
    Route("/v1/responses", to=FRONTEND, reads_body=True, only_stateless=True),
    Route("/v1/responses", to=CONTROL, reads_body=True),
    Route("/v1/responses/input_tokens", to=CONTROL, reads_body=True),
    Route("/v1/responses/", to=CONTROL, below=True),
    Route("/v1/files", to=CONTROL),
    Route("/v1/files/", to=CONTROL, below=True),
    Route("/v1/batches", to=CONTROL),
    Route("/v1/batches/", to=CONTROL, below=True),
    Route("/tokenize", to=CONTROL, reads_body=True),
    Route("/detokenize", to=CONTROL, reads_body=True),
    Route("/v1/usage", to=CONTROL),
    Route("/metrics", needs_admin=True),
    Route("/instances", needs_admin=True),
    Route("/openapi.json", needs_admin=True),
    Route("/docs", needs_admin=True),
    Route("/docs/", below=True, needs_admin=True),
)
"""What is not here is a 404."""


def find(path: str) -> Route | None:
    """Return the route of a path, without its query."""
    for route in ROUTES:
        if path == route.path or (route.below and path.startswith(route.path)):
            return route
    return None


def costs_tokens(path: str) -> bool:
    """Return whether a request to this path makes an engine work."""
    return not path.endswith(("/count_tokens", "/input_tokens", "tokenize"))
