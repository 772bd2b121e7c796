"""Runs `dynamo-vllm bench load`: sends requests from several client processes and reports the figures."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dynamo_vllm.bench.http import metrics, target
from dynamo_vllm.bench.http.answers import StageAnswers
from dynamo_vllm.bench.http.stream_client import StreamClient
from dynamo_vllm.bench.load import messages, stage_specs
from dynamo_vllm.bench.load.client_processes import ClientProcesses
from dynamo_vllm.bench.load.progress_json import ProgressJson
from dynamo_vllm.bench.load.progress_line import Progress, ProgressLine
from dynamo_vllm.bench.load.prompts import PATHS, Conversation, as_random
from dynamo_vllm.bench.report import figures, processes, rounds
from dynamo_vllm.bench.report import run_report as report
from dynamo_vllm.config import build, checks
from dynamo_vllm.config.options import LoadOptions
from dynamo_vllm.config.rules import bench as rules
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_vllm.bench.load.trace import Trace

_PAGE_SECONDS = 10.0
_PROBE_TOKENS = 4
_HITS = "vllm:prefix_cache_hits"


def add_arguments(parser: build.Parser) -> None:
    parser.add_argument("url", nargs="?", default=argparse.SUPPRESS, metavar="URL", help="same as --url")
    build.add_options(parser, LoadOptions)


def run(given: argparse.Namespace) -> int:
    """Run the command; return 1 if a stage had no complete answer, and 130 if it was interrupted."""
    options = build.from_values(LoadOptions, vars(given), build.environment())
    checks.check_load(options)
    draw = _plotter(options)
    file = None if options.json == "-" else rounds.json_file(options.json)
    outcome = measure(options, _progress(options))
    if not options.quiet:
        out = sys.stderr if options.json == "-" else sys.stdout
        out.write(report.text(outcome.report) + "\n")
    if file is not None:
        rounds.write(file, report.to_json(outcome.report))
    elif options.json == "-":
        sys.stdout.write(report.to_json(outcome.report).decode())
    if draw is not None and options.plots is not None:
        draw(outcome.report, outcome.stages, Path(options.plots))
    if outcome.report.interrupted:
        return 130
    return 0 if all(stage.requests.ok for stage in outcome.report.stages) else 1


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    report: report.RunReport
    stages: list[StageAnswers]


def measure(options: LoadOptions, line: Progress | None = None, more_urls: Sequence[str] = ()) -> LoadOutcome:
    """Run every stage of a load, for the command and for other benches. The caller checks the options.

    The client processes are spread over the server and those of `more_urls`.
    """
    where = target.parse_target(options.url, options.api_key)
    watch = processes.ProcessWatch(rules.watched(options))
    lines = stage_specs.trace_lines(options)
    model, context = _model(options, where)
    replay = stage_specs.replay(options, lines, context)
    stages = stage_specs.stages(options, model, context, replay)
    line = line or ProgressLine(None)
    if replay.clipped:
        line.say(
            f"{replay.clipped} of {len(replay.requests)} requests of the trace were shortened to fit into "
            f"the model's context of {context} tokens"
        )
    targets = [where, *(target.parse_target(url, options.api_key) for url in more_urls)]
    load = LoadRun(options, targets, watch, line)
    interrupted = asyncio.run(load.run(stages))
    made = report.RunReport(
        url=where.url,
        settings=_settings(options, model, context, replay),
        stages=load.reports,
        interrupted=interrupted,
    )
    return LoadOutcome(made, load.stages)


def _model(options: LoadOptions, where: target.Target) -> tuple[str, int | None]:
    """Return the model to send requests to, and its context if known."""
    known = {found.name: found.context for found in target.served_models(where, options.timeout)}
    model = options.model or next(iter(known), None)
    if model is None:
        raise target.BenchError(f"{where.url} lists no model; give --model NAME")
    return model, options.context or known.get(model)


def _settings(options: LoadOptions, model: str, context: int | None, replay: Trace) -> dict[str, object]:
    """Return the settings that the figures depend on, without the API key."""
    given = dataclasses.asdict(options)
    for name in ("api_key", "url", "json", "plots", "quiet", "progress", "progress_fd"):
        del given[name]
    return given | {
        "model": model,
        "context": context,
        "clients": stage_specs.client_count(options),
        "trace_clipped": replay.clipped,
    }


class LoadRun:
    """Runs the stages of a load one after the other and collects their figures."""

    def __init__(
        self,
        options: LoadOptions,
        targets: Sequence[target.Target],
        watch: processes.ProcessWatch,
        line: Progress,
    ) -> None:
        self._options = options
        self._targets = targets
        self._watch = watch
        self._line = line
        self._slo = rules.slo(options)
        self._interrupted = asyncio.Event()
        self.reports: list[report.StageReport] = []
        self.stages: list[StageAnswers] = []

    async def run(self, stages: Sequence[messages.StageSpec]) -> bool:
        """Run the stages; return whether SIGINT interrupted them. Finished stages are kept."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupted.set)
        clients: ClientProcesses | None = None
        try:
            for where in self._targets:
                await self._probe(where, stages[0])
            clients = await ClientProcesses.start(self._targets, self._options, self._interrupted)
            for stage in stages:
                await self._stage(clients, stage)
                if self._interrupted.is_set():
                    break
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            self._line.end()
            if clients is not None:
                await clients.end()
        return self._interrupted.is_set()

    async def _probe(self, where: target.Target, stage: messages.StageSpec) -> None:
        """Send one short request, so that a server which refuses ends the run with one message."""
        prompts = msgspec.structs.replace(
            as_random(stage.prompts), input_tokens=_PROBE_TOKENS, output_tokens=1, stage="probe"
        )
        client = StreamClient(where, PATHS[prompts.api], self._options.timeout)
        try:
            answer = await client.ask(Conversation(prompts, 0).next_body(()))
        finally:
            client.close()
        if answer.error:
            raise target.BenchError(f"{where.url} did not answer a first request: {answer.error}")

    async def _stage(self, clients: ClientProcesses, stage: messages.StageSpec) -> None:
        failed = await clients.prepare(stage)
        if failed:
            self._line.say(f"{stage.name}: {len(failed)} warm-up requests failed: {failed[0]}")
        before, hits = self._watch.sample(), await self._cache_hits()
        self._line.begin(stage.name)
        begun, done = await clients.go(self._line)
        if self._interrupted.is_set() and not any(part.answers for part in done):
            return
        after, hits_after = self._watch.sample(), await self._cache_hits()
        answers = sorted((answer for part in done for answer in part.answers), key=lambda a: a.sent)
        seconds = max((answer.ended for answer in answers), default=time.monotonic()) - begun
        answered = StageAnswers(stage.name, begun, seconds, answers)
        found = figures.stage_figures(answered, self._slo)
        tokens = found.tokens
        if hits is not None and hits_after is not None:
            tokens = msgspec.structs.replace(tokens, cached=int(hits_after - hits), cached_from="metrics")
        self.stages.append(answered)
        self.reports.append(
            report.StageReport(
                **msgspec.structs.asdict(msgspec.structs.replace(found, tokens=tokens)),
                processes=processes.usage_between(before, after, tokens.output),
                client=_client_figures(done, seconds, tokens.output),
            )
        )

    async def _cache_hits(self) -> float | None:
        """Return how many prompt tokens all engines have found in their caches; None if no metric says so."""
        pages = [await asyncio.to_thread(target.get, url, _PAGE_SECONDS) for url in self._options.metrics_url]
        found = [metrics.total(page.decode("utf-8", "replace"), _HITS) for page in pages if page is not None]
        known = [hits for hits in found if hits is not None]
        return sum(known) if known else None


def _client_figures(done: Sequence[messages.Done], seconds: float, tokens: int) -> report.ClientFigures:
    used = [part.cpu_seconds for part in done]
    return report.ClientFigures(
        processes=len(done),
        utilisation=round(max(used) / seconds, 4) if seconds > 0 else 0.0,
        cpu_us_per_token=round(sum(used) * 1e6 / tokens, 2) if tokens else None,
        late_ms=round(1000 * max(part.late_seconds for part in done), 3),
    )


def _progress(options: LoadOptions) -> Progress:
    """Return what shows how far the load is. Other programs get it although people want quiet."""
    if options.progress != "json":
        return ProgressLine(None if options.quiet else sys.stderr)
    try:
        return ProgressJson(os.fdopen(os.dup(options.progress_fd), "w"))
    except OSError as exc:
        raise ConfigError(
            f"--progress-fd {options.progress_fd} cannot be written: {exc.strerror}; name a file descriptor "
            "that the command was started with"
        ) from None


def _plotter(options: LoadOptions) -> Callable[..., None] | None:
    """Return the function that draws the plots. An error is raised now, not after an hour of load."""
    if options.plots is None:
        return None
    from dynamo_vllm.bench.report import plots

    plots.require(Path(options.plots))
    return plots.draw
