"""Runs the `dynamo-vllm` command: imports and runs the module of the sub-command."""

from __future__ import annotations

import importlib
import select
import signal
import sys
import traceback
from typing import TYPE_CHECKING

from dynamo_vllm.errors import ConfigError, DynamoVllmError

if TYPE_CHECKING:
    from collections.abc import Sequence

ADMIN = "dynamo_vllm.cli.running.admin"
PROCESSES = "dynamo_vllm.cli.running.processes"
SEVERAL = (ADMIN, PROCESSES)
"""Modules of several commands; they get the command's name as their first argument."""
COMMANDS = {
    "serve": ("dynamo_vllm.cli.start.serve", "serve a model on this machine: frontend, router and workers"),
    "worker": ("dynamo_vllm.cli.start.worker", "run one worker of a deployment"),
    "frontend": ("dynamo_vllm.cli.start.frontend", "run the OpenAI server and router of a deployment"),
    "gateway": ("dynamo_vllm.cli.start.gateway", "run a gateway: API keys, limits, usage, TLS"),
    "console": ("dynamo_vllm.cli.start.console", "show, try and operate a deployment in a browser"),
    "export": ("dynamo_vllm.cli.export", "turn a serve file into Kubernetes manifests or a compose file"),
    "check": (
        "dynamo_vllm.cli.check",
        "show versions and the resolved configuration, or prove a running system",
    ),
    "size": ("dynamo_vllm.cli.size", "compute what a model needs in GPU memory, and what fits"),
    "status": ("dynamo_vllm.cli.running.status", "show what a running system serves and how its workers are"),
    "processes": (PROCESSES, "show the processes of a serve on this machine"),
    "restart": (PROCESSES, "stop a process of a serve and start it again"),
    "drain": (PROCESSES, "stop a worker of a serve until it is restarted"),
    "scale": (PROCESSES, "change the number of workers of a serve"),
    "lora": (ADMIN, "load, unload and list LoRA adapters of running workers"),
    "sleep": (ADMIN, "take workers out of service and free their memory"),
    "wake": (ADMIN, "wake sleeping workers"),
    "pause": (ADMIN, "pause workers; everything stays in memory"),
    "resume": (ADMIN, "resume paused workers"),
    "clear-kv": (ADMIN, "clear the cached KV blocks of workers"),
    "reset-caches": (ADMIN, "clear caches of workers: prefix, multimodal, encoder"),
    "profile": (ADMIN, "start and stop a profile of workers' engines"),
    "keys": ("dynamo_vllm.cli.gateway.keys", "create, list and end API keys of the gateway, and set limits"),
    "usage": ("dynamo_vllm.cli.gateway.usage", "show the tokens that were used through the gateway"),
    "chat": ("dynamo_vllm.cli.running.chat", "chat with a model of a running system"),
    "search": (
        "dynamo_vllm.cli.running.search",
        "ask the documentation or a folder: embeddings, reranking, chat",
    ),
    "bench": ("dynamo_vllm.cli.bench", "measure a running system, or parts of this package"),
}
EXIT_CODES = (
    "Exit codes: 0 done, 1 could not start or serve, 2 bad settings, 3 the engine died, 128+n signal n."
)


def usage() -> str:
    lines = [
        "usage: dynamo-vllm COMMAND [OPTIONS]",
        "",
        "Serve large models with vLLM on the Dynamo runtime.",
        "",
    ]
    lines += [f"  {name:<12} {text}" for name, (_, text) in COMMANDS.items()]
    lines += [
        "",
        "  --version    versions of this package and its parts",
        "  COMMAND --help  options of a command",
        "",
    ]
    return "\n".join([*lines, EXIT_CODES])


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and exit with its code; never returns."""
    code = run(list(sys.argv[1:] if argv is None else argv))
    from dynamo_vllm.cli.process import exit_process

    exit_process(code)


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        from dynamo_vllm.cli.versions import report

        print(report())
        return 0
    if argv[0] not in COMMANDS:
        print(f"dynamo-vllm: {argv[0]!r} is not a command\n\n{usage()}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[argv[0]]
    return run_command(module, argv if module in SEVERAL else argv[1:])


def run_command(module: str, argv: Sequence[str]) -> int:
    """Run a sub-command and return its exit code; its own errors become one line on stderr."""
    try:
        return int(importlib.import_module(module).main(argv))
    except ConfigError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    except DynamoVllmError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 1
    except Exception as exc:  # a bug, or an error of another package: the traceback, and one line
        if isinstance(exc, BrokenPipeError) and is_output_closed():
            return 128 + signal.SIGPIPE
        traceback.print_exc()
        print(f"error: {type(exc).__name__}: {exc}", file=sys.stderr)
        return 1


def is_output_closed() -> bool:
    """Return whether the reader of our standard output, such as `head`, has closed it."""
    poller = select.poll()
    poller.register(1, 0)
    return any(event & select.POLLERR for _, event in poller.poll(0))


if __name__ == "__main__":
    main()
