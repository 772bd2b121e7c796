"""Decides which part answers which path, and who may call it."""

from __future__ import annotations

from dataclasses import dataclass

FRONTEND, CONTROL = "frontend", "control"
CHANGING = ("POST", "PUT", "PATCH", "DELETE")
READING = ("GET", "HEAD")
CHOICE = "x-gateway-choice"
"""Chooses between the routes of one path, by what the control app has read of the body."""
STATELESS = "stateless"
"""A response that is not kept, needs no history and is waited for."""
PAST_FRONTEND = "past-frontend"
"""A body with a field that the frontend would drop or refuse."""


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
    choice: str = ""
    """Which bodies it is for; the next route of the path has the others."""
    takes_form: bool = False
    """Whether a form names a model and costs tokens; the control app reads it."""
    takes_file: bool = False
    """Whether a form brings a file."""
    is_socket: bool = False
    """Whether it is a WebSocket, whose query names a model."""
    is_list: bool = False
    """Whether reading it takes many rows, and counts as a request; those that change something always do."""

    @property
    def uses_engine(self) -> bool:
        return self.reads_body or self.takes_form or self.is_socket

    def counts(self, method: str) -> bool:
        """Return whether a request counts although no engine works for it."""
        return self.to == CONTROL and (method in CHANGING or (self.is_list and method in READING))


ROUTES = (
    Route("/live", is_public=True),
    Route("/health", is_public=True),
    Route("/v1/chat/completions", reads_body=True),
    Route("/v1/completions", reads_body=True),
    Route("/v1/messages", reads_body=True),
    Route("/v1/messages/count_tokens", reads_body=True),
    Route("/v1/embeddings", to=CONTROL, reads_body=True, choice=PAST_FRONTEND),
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
    Route("/v1/responses", to=FRONTEND, reads_body=True, choice=STATELESS),
    Route("/v1/responses", to=CONTROL, reads_body=True),
    Route("/v1/responses/input_tokens", to=CONTROL, reads_body=True),
    Route("/v1/responses/", to=CONTROL, below=True),
    Route("/v1/files", to=CONTROL, takes_file=True, is_list=True),
    Route("/v1/files/", to=CONTROL, below=True),
    Route("/v1/batches", to=CONTROL, is_list=True),
    Route("/v1/batches/", to=CONTROL, below=True),
    Route("/tokenize", to=CONTROL, reads_body=True),
    Route("/detokenize", to=CONTROL, reads_body=True),
    Route("/v1/usage", to=CONTROL, is_list=True),
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
