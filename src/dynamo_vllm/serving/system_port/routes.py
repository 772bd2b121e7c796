"""Maps HTTP routes of the system port to verbs."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote

from dynamo_vllm.admin.verbs import VERBS
from dynamo_vllm.errors import BadCommand


class NoRoute(BadCommand):
    status = 404


class WrongMethod(BadCommand):
    status = 405


@dataclass(frozen=True, slots=True)
class Route:
    """One route of a verb; a part in braces is a field of its body."""

    method: str
    parts: tuple[str, ...]
    verb: str

    def fields(self, parts: tuple[str, ...]) -> dict[str, str] | None:
        """Return the fields in a path, or None if it does not match. The last field takes the rest."""
        last = len(self.parts) - 1
        if self.parts[-1].startswith("{") and len(parts) > len(self.parts):
            parts = (*parts[:last], "/".join(parts[last:]))
        if len(parts) != len(self.parts):
            return None
        found = {}
        for mine, theirs in zip(self.parts, parts, strict=True):
            if mine.startswith("{"):
                found[mine.strip("{}")] = unquote(theirs)
            elif mine != theirs:
                return None
        return found


def _split(path: str) -> tuple[str, ...]:
    return tuple(path.strip("/").split("/"))


CONTROL = ("sleep", "wake_up", "start_profile", "stop_profile")
"""Verbs that python -m dynamo.vllm has at /engine/control/NAME; callers written for it find them there."""
ROUTES = (
    *(Route("POST", ("engine", name), name) for name in VERBS),
    *(Route("POST", ("engine", "control", name), name) for name in CONTROL),
    *(Route(verb.rest[0], _split(verb.rest[1]), verb.name) for verb in VERBS.values() if verb.rest),
)


def route(method: str, path: str) -> tuple[str, dict[str, str]]:
    """Return the verb of a request and the part of its body that is in the path."""
    parts = _split(path)
    matches = [(way, fields) for way in ROUTES if (fields := way.fields(parts)) is not None]
    for way, fields in matches:
        if way.method == method:
            return way.verb, fields
    if matches:
        raise WrongMethod(f"{path} takes {' or '.join(sorted({way.method for way, _ in matches}))}")
    raise NoRoute(f"there is no {path}; verbs are at /engine/NAME with {', '.join(VERBS)}")
