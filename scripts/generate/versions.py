"""`make docs` writes from `tests/runs.toml` what was proven of each vLLM: docs/versions.md, and for warnings.

PYTHONPATH=scripts python -m generate.versions [--check]
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import setup_packages
from versions import SUITES

from dynamo_vllm.engine.vllm.compat.versions import EVERYTHING, ON_GPU
from generate.docs import table

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "runs.toml"
PAGE = ROOT / "docs" / "versions.md"
MODULE = ROOT / "src" / "dynamo_vllm" / "engine" / "vllm" / "compat" / "not_proven.py"
OMNI = "pipelines of vLLM-Omni"
CONTRACT = "names and behaviour of vLLM that we use"
SHOWN_BY: dict[str, tuple[str, ...]] = {
    CONTRACT: ("contract",),
    "the same tokens as bare vLLM": ("cpu/test_parity",),
    "direct egress": ("cpu/test_direct",),
    "cancellation": ("cpu/test_cancel",),
    "KV events": ("cpu/test_two_workers",),
    "prefill and decode apart": (
        "cpu/test_disaggregation",
        "cpu/test_disaggregation_faults",
        "cpu/test_prefill_routing",
    ),
    "LoRA": ("cpu/test_lora", "cpu/test_lora_combined", "cpu/test_lora_pairs"),
    "media and encode workers": ("cpu/test_multimodal", "cpu/test_encoder"),
    "headless nodes": ("cpu/test_multi_node",),
    "prompt embeddings": ("cpu/test_prompt_embeds", "cpu/test_embeds_engine"),
    "structured output": ("cpu/test_guides",),
    "speculative decoding": ("cpu/test_speculative",),
    "sleep": ("cpu/test_sleep",),
    "data parallel": ("cpu/test_data_parallel",),
    OMNI: ("cpu/test_omni",),
    "serving on a GPU": ("gpu/smoke",),
    "NIXL between engines on a GPU": ("gpu/disaggregation",),
}
"""Files of `tests/`, and of `scripts/` for a GPU, that show something; all of them are needed."""
_MARKED = re.compile(r"(<!-- (\w+): written by `make docs` -->\n).*?(<!-- end -->)", re.S)
_HEAD = '''"""What nobody has proven of a version of vLLM: written by `make docs` from tests/runs.toml."""

NOT_PROVEN: dict[tuple[int, ...], tuple[str, ...]] = {
'''


@dataclass(frozen=True, slots=True)
class Run:
    """One time that tests were run: `ran` are tiers, suites or files, `failed` files of these."""

    vllm: str
    machine: str
    device: str
    ran: tuple[str, ...]
    date: date
    failed: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return f"{self.device} ({self.machine})"

    def outcome(self, file: str) -> bool | None:
        """None where the run did not have this file."""
        paths = [path for name in self.ran for path in SUITES.get(_suite(name), ())]
        has_it = {file, file.partition("/")[0]} & {*self.ran, *map(_short, paths)}
        failed = {name for path in self.failed for name in (path, path.partition("/")[0])}
        return file not in failed if has_it else None


def main(argv: Sequence[str]) -> int:
    if list(argv) not in ([], ["--check"]):
        print("usage: PYTHONPATH=scripts python -m generate.versions [--check]", file=sys.stderr)
        return 2
    runs = read(RUNS.read_text())
    wanted = {PAGE: page(PAGE.read_text(), runs), MODULE: module(runs)}
    stale = {path: text for path, text in wanted.items() if path.read_text() != text}
    for path, text in stale.items():
        if argv:
            told = f"{path.relative_to(ROOT)} is not what tests/runs.toml says; run 'make docs'"
            print(f"error: {told}", file=sys.stderr)
        else:
            path.write_text(text)
    return int(bool(argv and stale))


def read(text: str) -> list[Run]:
    """The runs, oldest first; a file that is named must exist."""
    found = []
    for entry in tomllib.loads(text)["run"]:
        run = Run(ran=tuple(entry.pop("ran")), failed=tuple(entry.pop("failed", ())), **entry)
        for name in (*run.ran, *run.failed):
            if not _exists(name):
                raise SystemExit(f"tests/runs.toml: there is no tier, suite or file called {name!r}")
        if not isinstance(run.date, date) or run.vllm not in setup_packages.versions():
            raise SystemExit(
                f"tests/runs.toml: a run with vLLM {run.vllm} on {run.date}: no lock, or no date"
            )
        found.append(run)
    return sorted(found, key=lambda run: run.date)


def _exists(name: str) -> bool:
    folder, _, file = name.partition("/")
    if not file:
        return _suite(name) in SUITES or (ROOT / "tests" / name).is_dir()
    parent = ROOT / ("scripts" if folder == "gpu" else "tests")
    return (parent / f"{name}.py").is_file()


def _suite(name: str) -> str:
    """Of `suite short` the name; a tier has none, though one is called like a suite."""
    return name.removeprefix("suite ") if name.startswith("suite ") else ""


def _short(path: str) -> str:
    return path.partition("::")[0].removeprefix("tests/").removesuffix(".py")


# --- what follows ---------------------------------------------------------------------------------------


def proven(version: str, what: str, runs: Sequence[Run]) -> dict[str, str]:
    """By place: the day on which the last of its files passed, or a word. Of a file the last run counts."""
    told = {}
    for place in dict.fromkeys(run.place for run in runs if run.vllm == version):
        here = [run for run in runs if (run.vllm, run.place) == (version, place)]
        last = {
            file: (outcome, run.date)
            for file in SHOWN_BY[what]
            for run in here
            if (outcome := run.outcome(file)) is not None
        }
        passed = [day for outcome, day in last.values() if outcome]
        if len(passed) < len(last):
            told[place] = "fails"
        elif len(last) == len(SHOWN_BY[what]):
            told[place] = str(max(passed))
        elif last:
            told[place] = "in part"
    return told


def is_proven(version: str, what: str, runs: Sequence[Run]) -> bool:
    """Passed somewhere, and not the less so because it fails or was not tried in another place."""
    return any(said[0].isdigit() for said in proven(version, what, runs).values())


def module(runs: Sequence[Run]) -> str:
    lines = []
    for version in setup_packages.versions():
        left = [f'"{what}"' for what in (*EVERYTHING, *ON_GPU) if not is_proven(version, what, runs)]
        key = f"    ({', '.join(version.split('.')[:2])}): "
        if len(left) < 2:
            lines.append(f"{key}({''.join(f'{part},' for part in left)}),\n")
        else:
            lines.append(f"{key}(\n{''.join(f'        {part},{chr(10)}' for part in left)}    ),\n")
    return f"{_HEAD}{''.join(lines)}}}\n"


def page(text: str, runs: Sequence[Run]) -> str:
    parts = {"packages": packages(), "runs": capabilities(runs)}
    return _MARKED.sub(lambda found: "\n".join((found[1], *parts[found[2]], "", found[3])), text)


def capabilities(runs: Sequence[Run]) -> list[str]:
    known = setup_packages.versions()
    rows = []
    for what, files in SHOWN_BY.items():
        cells = ["; ".join(_cells(version, what, runs)) or "not run" for version in known]
        rows.append([what, *cells, ", ".join(f"`{file}`" for file in files)])
    return table(("what", *known, "shown by"), rows)


def _cells(version: str, what: str, runs: Sequence[Run]) -> Iterator[str]:
    if what == OMNI and not version.startswith(setup_packages.OMNI_NEEDS):
        yield "not for this version"
        return
    for place, said in proven(version, what, runs).items():
        yield f"{place} {said}" if said[0].isdigit() else f"{said}: {place}"


def packages() -> list[str]:
    names = ("torch", "transformers", "xgrammar")
    rows = []
    for version in setup_packages.versions():
        pins = dict(line.split("==") for line in setup_packages.pins("cpu", [], version) if ";" not in line)
        is_default = version == setup_packages.default_version()
        rows.append([f"{version}, the default" if is_default else version, *(pins[name] for name in names)])
    return table(("vLLM", *names), rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
