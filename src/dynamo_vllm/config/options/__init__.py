"""Every option once: type, default, environment variable, flag names, help."""

from dynamo_vllm.config.options.bench import LoadOptions
from dynamo_vllm.config.options.frontend import ROUTERS, FrontendOptions
from dynamo_vllm.config.options.runtime import DISCOVERY_BACKENDS, RuntimeOptions
from dynamo_vllm.config.options.serve import ServeOptions
from dynamo_vllm.config.options.worker import ROLES, WorkerOptions

__all__ = [
    "DISCOVERY_BACKENDS",
    "ROLES",
    "ROUTERS",
    "FrontendOptions",
    "LoadOptions",
    "RuntimeOptions",
    "ServeOptions",
    "WorkerOptions",
]
