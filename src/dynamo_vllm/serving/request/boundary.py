"""Maps our errors to the runtime's, in one place."""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dynamo.llm import HttpError
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, StreamIncomplete

from dynamo_vllm.errors import (
    ClientBehind,
    EngineDead,
    EngineError,
    NotTriedAgain,
    Overloaded,
    RequestError,
    WorkerError,
)
from dynamo_vllm.serving.request.cancel import LEAVING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)


def _ignore(message: str) -> None:
    """Ignore the error."""


def _no_client() -> bool:
    return True


@contextmanager
def boundary(
    request_id: str,
    on_dead: Callable[[EngineDead], None],
    on_error: Callable[[str], None] = _ignore,
    has_left: Callable[[], bool] = _no_client,
) -> Iterator[None]:
    """Turn any error of a request into an exception that the frontend understands.

    `on_error` gets errors that are our own fault; a request that moves to another worker is not an error.

    InvalidArgument is the only one whose message reaches the client. StreamIncomplete and EngineShutdown make
    the frontend move the request and skip this worker for some seconds: use them only for a worker that is
    leaving. Causes are removed because the runtime prints the whole chain for every refused request.

    A request is cancelled when its client `has_left`, or when this process ends at once. Only in the first
    case may the runtime say so: the frontend would pass it on to a client that waits.
    """
    try:
        yield
    except asyncio.CancelledError:
        if has_left():
            raise
        raise StreamIncomplete(LEAVING) from None
    except GeneratorExit:
        raise
    except RequestError as exc:
        level = logging.WARNING if isinstance(exc, ClientBehind) else logging.DEBUG
        logger.log(level, "request %s: refused: %s", request_id, exc)
        raise (InvalidArgument(str(exc)) if exc.status == 400 else HttpError(exc.status, str(exc))) from None
    except WorkerError as exc:
        logger.info("request %s: moves to another worker: %s", request_id, exc)
        raise StreamIncomplete(str(exc)) from None
    except (Overloaded, NotTriedAgain) as exc:
        # Not moved: that would keep all other requests away from a working worker.
        logger.warning("request %s: %s", request_id, exc)
        raise HttpError(exc.status, str(exc)) from None
    except EngineDead as exc:
        on_error(str(exc))
        on_dead(exc)
        raise EngineShutdown(str(exc)) from None
    except EngineError as exc:
        on_error(str(exc))
        logger.error("request %s: %s", request_id, exc)
        raise HttpError(exc.status, "the engine failed on this request") from None
    except Exception as exc:
        on_error(f"unexpected {type(exc).__name__}, see the log")  # its text may contain request content
        logger.exception("request %s: unexpected error", request_id)
        raise HttpError(500, "internal error") from None
