"""Says in words what a `serve` has done: for the commands and for the console."""

from __future__ import annotations

from typing import Any

Result = dict[str, Any]


def restarted(result: Result) -> str:
    process = result["process"]
    return f"{process['name']}: ready after {result['seconds']:.1f} s, pid {process['pid']}"


def drained(result: Result) -> str:
    name = result["process"]["name"]
    again = f"'dynamo-vllm restart {name}' starts it again"
    said = f"{name}: drained and stopped after {result['seconds']:.1f} s; {again}"
    if result["was_last"]:
        return (
            f"{said}\nno other {result['role']} worker of {result['model']} is in service: requests for it "
            "fail until one is"
        )
    return said


def scaled(result: Result) -> str:
    changes = [f"{', '.join(result[key])} {key}" for key in ("started", "stopped") if result[key]] or [
        "nothing to do"
    ]
    count = len(result["workers"])
    workers = f"{count} worker{'s' * (count != 1)}"
    if idle := result.get("drained"):
        workers += f", of which {', '.join(idle)} {'is' if len(idle) == 1 else 'are'} drained"
    return f"{result['group']}: {workers} ({'; '.join(changes)}) after {result['seconds']:.1f} s"
