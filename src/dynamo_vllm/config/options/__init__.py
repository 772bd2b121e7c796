"""Every option once: type, default, environment variable, flag names, help."""

from dynamo_vllm.config.options.admin import (
    AdminOptions,
    DrainOptions,
    FindOptions,
    PauseOptions,
    ProfileOptions,
    ResetOptions,
    SleepOptions,
)
from dynamo_vllm.config.options.bench.load import LoadOptions
from dynamo_vllm.config.options.bench.plane import PlaneOptions
from dynamo_vllm.config.options.bench.pooling import PoolingBenchOptions
from dynamo_vllm.config.options.bench.routing import RoutingOptions
from dynamo_vllm.config.options.bench.scale import ScaleOptions
from dynamo_vllm.config.options.console import ConsoleOptions, ConsoleSettings
from dynamo_vllm.config.options.export import ExportOptions
from dynamo_vllm.config.options.frontend import ROUTERS, FrontendOptions
from dynamo_vllm.config.options.gateway.serving import GatewayOptions, GatewaySettings
from dynamo_vllm.config.options.runtime import DISCOVERY_BACKENDS, ReachOptions, RuntimeOptions
from dynamo_vllm.config.options.serve import ServeOptions
from dynamo_vllm.config.options.size import SizeOptions
from dynamo_vllm.config.options.worker import WorkerOptions

__all__ = [
    "DISCOVERY_BACKENDS",
    "ROUTERS",
    "AdminOptions",
    "ConsoleOptions",
    "ConsoleSettings",
    "DrainOptions",
    "ExportOptions",
    "FindOptions",
    "FrontendOptions",
    "GatewayOptions",
    "GatewaySettings",
    "LoadOptions",
    "PauseOptions",
    "PlaneOptions",
    "PoolingBenchOptions",
    "ProfileOptions",
    "ReachOptions",
    "ResetOptions",
    "RoutingOptions",
    "RuntimeOptions",
    "ScaleOptions",
    "ServeOptions",
    "SizeOptions",
    "SleepOptions",
    "WorkerOptions",
]
