"""Every error we raise, by whose fault it is.

DynamoVllmError
├── ConfigError          refused at start, exit 2: the flag, the value, the fix
├── RequestError         the client's fault
│   ├── InvalidRequest   400
│   ├── TooLong          400
│   ├── UnknownModel     404
│   ├── ClientBehind     408, the client does not read its answer
│   └── MediaRefused     400, an image, video or audio that is not loaded
│       ├── MediaTooLarge      413
│       └── MediaTypeUnknown   415
├── WorkerError          another worker may serve it
│   ├── Draining         503
│   └── Asleep           503
├── Overloaded           503, this request only: it waited too long in a queue
├── NotTriedAgain        503, this request only: it has crashed workers
├── EngineError
│   ├── EngineRequestFailed   500, this request only
│   ├── EngineOverloaded      503, this request only
│   └── EngineDead            503, this process must end
├── AdminError           an admin verb that was not done; the message is for the operator
│   ├── BadCommand       400
│   ├── NotAllowed       403
│   ├── AdapterUnknown   404
│   ├── WrongState       409, the worker's state does not allow it
│   ├── AdapterConflict  409, the name is taken by other content
│   ├── NoRoom           409, every slot is taken
│   ├── AdapterRefused   422, the files cannot be served with this base model
│   ├── SourceFailed     502, the files could not be fetched
│   └── NotListed        503, discovery did not add or remove it
└── StartError           the worker or a child could not start, exit 1
"""

from __future__ import annotations


class DynamoVllmError(Exception):
    """Base of everything raised on purpose."""


class ConfigError(DynamoVllmError):
    """A setting that cannot work; the message names the flag, the value and the fix."""


class StartError(DynamoVllmError):
    """A process that could not start; the message says what was missing."""


class RequestError(DynamoVllmError):
    """The client's fault. `parameter` names the field of the request."""

    status = 400

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter

    def __str__(self) -> str:
        text = super().__str__()
        if self.parameter is None or self.parameter in text:
            return text
        return f"{self.parameter}: {text}"


class InvalidRequest(RequestError):
    """A field whose value we cannot serve."""


class TooLong(RequestError):
    """Prompt and answer do not fit into the model's context."""


class UnknownModel(RequestError):
    """A model or adapter this worker does not have."""

    status = 404


class ClientBehind(RequestError):
    """The client does not read, and too much of its answer waits in the worker."""

    status = 408


class MediaRefused(RequestError):
    """Media that cannot or must not be loaded. The message has nothing that the client did not send."""


class MediaTooLarge(MediaRefused):
    """Above a limit: bytes, pixels, frames, seconds, or how many there are."""

    status = 413


class MediaTypeUnknown(MediaRefused):
    """The bytes are of no type that we decode, whatever their name or header says."""

    status = 415


class WorkerError(DynamoVllmError):
    """This worker cannot serve the request, another one may."""

    status = 503


class Draining(WorkerError):
    """The worker is leaving; the frontend moves the request to another one."""


class Asleep(WorkerError):
    """The worker sleeps or is paused, and the frontend does not know it yet."""


class Overloaded(DynamoVllmError):
    """The request waited too long in a queue of this worker; a retry may succeed."""

    status = 503


class NotTriedAgain(DynamoVllmError):
    """The request has crashed workers before its first token; no other worker tries it."""

    status = 503


class EngineError(DynamoVllmError):
    """The engine failed."""

    status = 500


class EngineRequestFailed(EngineError):
    """One request failed inside the engine; the engine continues."""


class EngineOverloaded(EngineError):
    """The engine refused the request because its queue is full."""

    status = 503


class EngineDead(EngineError):
    """The engine has ended: the process must end so that a supervisor replaces it."""

    status = 503


class AdminError(DynamoVllmError):
    """An admin verb that was not done. `kind` is for programs."""

    status = 500
    kind = "failed"


class BadCommand(AdminError):
    """An unknown verb, or a body that it does not accept."""

    status, kind = 400, "bad_command"


class NotAllowed(AdminError):
    """The token is missing or wrong, or the caller is not on this machine."""

    status, kind = 403, "not_allowed"


class AdapterUnknown(AdminError):
    """There is no adapter of this name."""

    status, kind = 404, "adapter_unknown"


class WrongState(AdminError):
    """The worker's state does not allow it; the message says what would."""

    status, kind = 409, "wrong_state"


class AdapterConflict(AdminError):
    """The name belongs to the base model, or to an adapter with other content."""

    status, kind = 409, "adapter_conflict"


class NoRoom(AdminError):
    """Every adapter slot of the engine is taken."""

    status, kind = 409, "no_room"


class AdapterRefused(AdminError):
    """The adapter's files cannot be served with this base model."""

    status, kind = 422, "adapter_refused"


class SourceFailed(AdminError):
    """The adapter's files could not be fetched."""

    status, kind = 502, "source_failed"


class NotListed(AdminError):
    """Discovery did not add or remove an adapter or the worker."""

    status, kind = 503, "not_listed"
