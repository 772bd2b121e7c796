"""Draws plots of a run as SVG and PNG: distributions of times, a comparison of stages, a timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynamo_vllm.bench.report import figures
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from dynamo_vllm.bench.http.answers import StageAnswers
    from dynamo_vllm.bench.report.run_report import RunReport

FORMATS = ("svg", "png")
_MOST_POINTS = 2000
_TIMELINE_STEPS = 100


def require(folder: Path) -> None:
    """Raise an error if plots cannot be drawn, before anything is measured."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plots needs matplotlib; pip install 'dynamo-vllm[bench]'") from None
    matplotlib.use("agg")  # no screen is needed
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--plots {folder} cannot be created: {exc.strerror}") from None


def draw(report: RunReport, stages: Sequence[StageAnswers], folder: Path) -> None:
    """Write every plot into the folder."""
    from matplotlib import pyplot

    for name, plot in (("ttft", _ttft), ("itl", _itl), ("stages", _stages), ("timeline", _timeline)):
        figure = plot(pyplot, report, stages)
        for kind in FORMATS:
            figure.savefig(folder / f"{name}.{kind}", dpi=120)
        pyplot.close(figure)


def _ttft(pyplot: Any, report: RunReport, stages: Sequence[StageAnswers]) -> Any:
    seen = ((stage.name, [figures.ttft(a) for a in _good(stage)]) for stage in stages)
    return _spread(pyplot, "time to first token", seen)


def _itl(pyplot: Any, report: RunReport, stages: Sequence[StageAnswers]) -> Any:
    seen = ((stage.name, [gap for a in _good(stage) for gap in figures.gaps(a)]) for stage in stages)
    return _spread(pyplot, "time between tokens", seen)


def _good(stage: StageAnswers) -> list[Any]:
    return [answer for answer in stage.answers if figures.is_ok(answer)]


def _spread(pyplot: Any, title: str, seen: Iterable[tuple[str, list[float]]]) -> Any:
    """Plot the cumulative share of times, and their density."""
    figure, (shares, counts) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    spread = [(name, [value * 1000 for value in sorted(seconds)]) for name, seconds in seen if seconds]
    # With the slowest ones included, all others would fall into one bar.
    widest = max((figures.quantile(ordered, 0.99) for _, ordered in spread), default=1.0)
    for name, ordered in spread:
        last = max(1, len(ordered) - 1)
        places = range(0, len(ordered), max(1, len(ordered) // _MOST_POINTS))
        shares.plot([ordered[p] for p in places], [p / last for p in places], label=name)
        counts.hist(ordered, bins=60, range=(0, widest or 1.0), histtype="step", density=True, label=name)
    shares.set(title=f"{title}: share of all", xlabel="ms", ylabel="share", ylim=(0, 1.02))
    counts.set(title=f"{title}: distribution up to p99", xlabel="ms", ylabel="density")
    return _finish(figure, (shares, counts))


def _stages(pyplot: Any, report: RunReport, stages: Sequence[StageAnswers]) -> Any:
    """Plot throughput and percentiles by stage."""
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    names = [stage.name for stage in report.stages]
    axes[0].plot(names, [stage.tokens.output_per_second for stage in report.stages], marker="o")
    axes[0].set(title="throughput", ylabel="output tokens per second", ylim=(0, None))
    shown = (
        (axes[1], "time to first token", [stage.ttft_ms for stage in report.stages]),
        (axes[2], "time between tokens", [stage.itl_ms for stage in report.stages]),
    )
    for axis, title, spreads in shown:
        axis.plot(names, [_number(spread.p50) for spread in spreads], "o-", label="p50")
        axis.plot(names, [_number(spread.p90) for spread in spreads], "o-", label="p90")
        axis.plot(names, [_number(spread.p99) for spread in spreads], "o-", label="p99")
        axis.set(title=title, ylabel="ms", ylim=(0, None))
    return _finish(figure, axes)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _timeline(pyplot: Any, report: RunReport, stages: Sequence[StageAnswers]) -> Any:
    """Plot tokens per second over the time of each stage."""
    figure, axis = pyplot.subplots(figsize=(11, 4.2), layout="constrained")
    for stage in stages:
        width = max(stage.seconds / _TIMELINE_STEPS, 0.01)
        steps = figures.timeline(stage.answers, stage.begun, width)
        axis.plot([(number + 0.5) * width for number in range(len(steps))], steps, label=stage.name)
    axis.set(title="tokens per second", xlabel="seconds since the start of the stage", ylim=(0, None))
    return _finish(figure, (axis,))


def _finish(figure: Any, axes: Iterable[Any]) -> Any:
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
    return figure
