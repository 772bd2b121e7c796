"""Runs scenarios as often as requested and prints the outcomes as a table.

    python scripts/faults [--runs 3] [--only stalled,fifo] [--page docs/faults.md] [--logs build/faults]

Exits 1 when a run failed; its folder, with all logs, is then below --logs. With --page the rows of the
scenarios that ran are written into that page, and those of others stay.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import traceback
from pathlib import Path

from dynamo_vllm.models.tiny import make_tiny_model
from faults import page
from faults.attacks import clients, gateway, guides, machine, neighbours
from faults.failures import (
    engines,
    handover,
    leaving,
    network,
    operating,
    overload,
    planes,
    soak,
    surroundings,
    workers,
)
from faults.scenario import Fault, Result, Run, Scenario, Sites

ATTACKS = (clients, guides, neighbours, machine, gateway)
FAILURES = (workers, engines, leaving, overload, handover, operating, network, planes, surroundings, soak)
SCENARIOS: dict[str, Scenario | Fault] = {
    scenario.name: scenario for family in (*ATTACKS, *FAILURES) for scenario in family.SCENARIOS
}


def main(words: list[str]) -> int:
    options = parsed(words)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # some scenarios act as another user
        model = make_tiny_model(folder / "tiny")
        results = [
            repeated(SCENARIOS[one], options, Sites(folder / one / "sites", model)) for one in options.only
        ]
    print("\n" + page.tables(results))
    if options.page is not None:
        page.write(options.page, results, list(SCENARIOS))
        print(f"written into {options.page}")
    return 1 if any(result.failures for result in results) else 0


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(SCENARIOS)
    parser.add_argument("--runs", type=int, default=3, help="of each scenario")
    parser.add_argument("--only", type=chosen, default=list(SCENARIOS), help=f"of {names}")
    parser.add_argument("--page", type=Path, help="to write the table into")
    parser.add_argument("--soak-minutes", type=float, default=30, help="of the one run of `soak`")
    parser.add_argument("--logs", type=Path, default=Path("build/faults"), help="of failed runs")
    return parser.parse_args(words)


def chosen(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in SCENARIOS]:
        raise argparse.ArgumentTypeError(
            f"there is no {', '.join(unknown)}; there are {', '.join(SCENARIOS)}"
        )
    return names


def repeated(scenario: Scenario | Fault, options: argparse.Namespace, sites: Sites) -> Result:
    """All runs of one scenario, each told as it ends."""
    result = Result(scenario, skipped=scenario.refusal())
    if result.skipped is not None:
        print(f"{scenario.name}: not run, {result.skipped}", flush=True)
        return result
    folder = sites.folder.parent
    sites.folder.mkdir(parents=True)
    is_single = isinstance(scenario, Scenario) and scenario.once
    try:
        for number in range(1, 2 if is_single else options.runs + 1):
            run = Run(number, folder / str(number), sites, options.soak_minutes)
            sites = once(result, run, options.logs)
    finally:
        sites.close()
    return result


def once(result: Result, run: Run, logs: Path) -> Sites:
    """One run; the deployments for the next one, which are new after a failure."""
    run.folder.mkdir()
    name = result.scenario.name
    began = time.monotonic()
    result.runs += 1
    try:
        outcome = result.scenario.act(run)
        result.add(outcome)
    except Exception as exc:  # whatever it is, this run has failed and the next one follows
        result.failures.append(str(exc) or repr(exc))
        kept = keep(run, logs / f"{name}-{run.number}", traceback.format_exc())
        print(f"{name} {run.number}: FAILED, {result.failures[-1][:300]}\n  logs: {kept}", flush=True)
        run.sites.close()
        again = Sites(run.folder / "sites", run.sites.model)
        again.folder.mkdir()
        return again
    print(f"{name} {run.number}: {time.monotonic() - began:.1f} s, {outcome}", flush=True)
    shutil.rmtree(run.folder, ignore_errors=True)
    return run.sites


def keep(run: Run, place: Path, story: str) -> Path:
    """What a failed run and its deployments wrote."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "story.txt").write_text(story)
    for source, name in ((run.folder, "run"), (run.sites.folder, "sites")):
        for path in source.rglob("*"):
            if path.suffix in (".log", ".out") and path.is_file():
                copy = place / name / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    return place
