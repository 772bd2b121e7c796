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
    only_past_frontend: bool = False
    """Whether it is for bodies with a field that the frontend would drop or refuse."""
    takes_form: bool = False
    """Whether a form names a model and costs tokens; the control app reads it."""
    is_socket: bool = False
    """Whether it is a WebSocket."""


ROUTES = (
    Route("/live", is_public=True),
    Route("/health", is_public=True),
    Route("/v1/chat/completions", reads_body=True),
    Route("/v1/completions", reads_body=True),
    Route("/v1/messages", reads_body=True),
    Route("/v1/messages/count_tokens", reads_body=True),
    Route("/v1/embeddings", to=CONTROL, reads_body=True, only_past_frontend=True),
    Route("/v1/embeddings", reads_body=True),
    Route("/v2/embed", to=CONTROL, reads_body=True),
    Route("/v1/classify", reads_body=True),
    Route("/v1/pooling", reads_body=True),
    Route("/v1/rerank", to=CONTROL, reads_body=True),
    Route("/rerank", to=CONTROL, reads_body=True),
    Route("/v2/rerank", to=CONTROL, reads_body=True),
    Route("/v1/score", to=CONTROL, reads_body=True),
    Route("/score", to=CONTROL, reads_body=True),
    Route("/v1/images/generations", reads_body=True),
    Route("/v1/images/edits", reads_body=True),
    Route("/v1/videos", reads_body=True),
    Route("/v1/videos/stream", reads_body=True),
    Route("/v1/audio/speech", reads_body=True),
    Route("/v1/audio/transcriptions", to=CONTROL, takes_form=True),
    Route("/v1/audio/translations", to=CONTROL, takes_form=True),
    Route("/v1/realtime", is_socket=True),
    Route("/v1/models", to=CONTROL),
    Route("/v1/models/", to=CONTROL, below=True),
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
