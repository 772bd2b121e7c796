"""Runs `dynamo-vllm worker`: one worker process."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dynamo_vllm import ports
from dynamo_vllm.cli.process import run_to_exit
from dynamo_vllm.config import build, checks, folders, forks, planes, runtime_env, worker_plan
from dynamo_vllm.engine.process import preload
from dynamo_vllm.engine.process.cpu_threads import usable_cores
from dynamo_vllm.forking import CannotFork
from dynamo_vllm.serving import descriptors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.forking import Zygote
    from dynamo_vllm.serving.lifecycle.progress import Progress

logger = logging.getLogger(__name__)

PROG = "dynamo-vllm worker"
DESCRIPTION = "Serve one model as a worker of a deployment."
EPILOG = (
    "Every engine flag of vLLM is accepted too and passed on untouched, for example --max-model-len, "
    "--tensor-parallel-size or --enforce-eager; 'vllm serve --help' lists them."
)


def main(argv: Sequence[str]) -> int:
    environment = folders.complete_environment(build.environment(), folders.for_worker)
    plan = worker_plan.parse(argv, environment, PROG, DESCRIPTION, EPILOG)
    checks.check_worker(plan, starts=True)
    options, is_headless = plan.options, plan.node.is_headless
    anywhere = options.system_host or options.bind_host or "0.0.0.0"
    if options.system_port:
        ports.refuse_taken("--system-port", anywhere, options.system_port)
    # The runtime reads this variable itself; no argument sets it.
    runtime_port, more = None, {"DYN_HEALTH_CHECK_ENABLED": str(options.runtime_health_check).lower()}
    if not is_headless:
        planes.refuse_unreachable(planes.servers(options, options.event_plane))
    if options.system_port is not None and not is_headless:
        # Our server listens on the system port; the runtime's own server gets another port.
        if options.card_port:
            ports.refuse_taken("--card-port", anywhere, options.card_port)
        ports.leave_out([options.system_port])
        runtime_port = options.card_port or ports.reserve_for_life()
        more |= {"DYN_SYSTEM_PORT": str(runtime_port), "DYN_LORA_ENABLED": "false"}
    descriptors.raise_limit()
    limits = descriptors.request_limit()
    more |= {name: value for name, value in limits.items() if name not in environment}
    threads = runtime_env.worker_threads(usable_cores())
    service = f"dynamo-vllm-{options.card.process_name}"
    runtime_env.export(options, environment, threads, service, **more)
    from dynamo_vllm.serving import worker
    from dynamo_vllm.serving.lifecycle.progress import Progress
    from dynamo_vllm.serving.logging import set_up

    set_up(options.log_level)
    worker.refuse(options)
    progress = Progress(options.status_fd)
    zygote = make_zygote(options, environment, progress)
    return run_to_exit(worker.run(plan, environment, runtime_port, progress, zygote))


def make_zygote(options: WorkerOptions, environment: Mapping[str, str], progress: Progress) -> Zygote | None:
    """Import vLLM and fork a process that starts engine cores, before this one has a second thread."""
    why_not = forks.why_not_forked(options, environment)
    if why_not is None:
        progress.phase("importing")
        try:
            return preload.import_and_fork(str(options.model), environment)
        except CannotFork as exc:
            why_not = str(exc)
    logger.info("engine cores start as new processes, without a fork: %s", why_not)
    return None
