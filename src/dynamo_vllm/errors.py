"""Every error we raise, by whose fault it is.

DynamoVllmError
├── ConfigError          refused at start, exit 2: the flag, the value, the fix
├── RequestError         the client's fault
│   ├── InvalidRequest   400
│   ├── TooLong          400
│   └── UnknownModel     404
├── WorkerError          another worker may serve it
│   └── Draining         503
├── EngineError
│   ├── EngineRequestFailed   500, this request only
│   ├── EngineOverloaded      503, this request only
│   └── EngineDead            503, this process must end
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


class WorkerError(DynamoVllmError):
    """This worker cannot serve the request, another one may."""

    status = 503


class Draining(WorkerError):
    """The worker is leaving; the frontend moves the request to another one."""


class EngineError(DynamoVllmError):
    """The engine failed."""

    status = 500


class EngineRequestFailed(EngineError):
    """One request failed inside the engine; the engine lives on."""


class EngineOverloaded(EngineError):
    """The engine refused the request because its queue is full."""

    status = 503


class EngineDead(EngineError):
    """The engine is gone for good: the process must end so that a supervisor replaces it."""

    status = 503
