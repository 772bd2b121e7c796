"""Runs a bench that starts its own workers, from the arguments of its command to its report."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

from dynamo_vllm.bench.report.rounds import json_file, print_line, write_json
from dynamo_vllm.config import build
from dynamo_vllm.config.options import PlaneOptions, RoutingOptions

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

Options = TypeVar("Options", PlaneOptions, RoutingOptions)
Result = TypeVar("Result")


def run_local(
    given: argparse.Namespace,
    options_type: type[Options],
    check: Callable[[Options], None],
    measure: Callable[[Options, Mapping[str, str]], Result],
    report: Callable[[Result], str],
    field: str,
) -> int:
    """Check the options, measure, print the report, and write the result to the JSON file under `field`."""
    environment = build.environment()
    options = build.from_values(options_type, vars(given), environment)
    check(options)
    file = json_file(options.json)
    result = measure(options, environment)
    print_line(report(result))
    write_json(file, {"version": 1, "settings": dataclasses.asdict(options), field: result})
    return 0
