"""GPUs by name, and how much of their memory an engine can use."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dynamo_vllm.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    gib: float
    """As the driver shows it to a program, slightly less than advertised."""

    @property
    def has_large_batches(self) -> bool:
        """vLLM 0.30 takes larger steps on GPUs from 70 GiB on, except the A100."""
        return self.gib >= 70 and self.name != "A100"


KNOWN = {
    "A10": 22.0,
    "A100": 79.2,
    "A100-40": 39.4,
    "B200": 178.3,
    "H100": 79.1,
    "H200": 139.8,
    "L4": 22.0,
    "L40S": 44.4,
    "MI300X": 191.9,
    "RTX4090": 23.5,
}
_OTHER_NAMES = {"A100-80": "A100", "A100-40GB": "A100-40", "A100-80GB": "A100", "4090": "RTX4090"}
_WRITTEN = re.compile(r"(?:(?P<count>\d+)[xX×])?(?P<name>[A-Za-z0-9][A-Za-z0-9_-]*)(?::(?P<gib>[\d.]+))?")


@dataclass(frozen=True, slots=True)
class Gpus:
    count: int
    gpu: Gpu

    def __str__(self) -> str:
        return f"{self.count}x{self.gpu.name}"


def read(text: str) -> Gpus:
    """'16xH200', 'H100', '8xH100:80', '2xNEW:96'."""
    found = _WRITTEN.fullmatch(text.strip().replace(" ", ""))
    if not found:
        raise ConfigError(f"--gpus {text!r} is not understood; write 8xH200, or 8xNAME:GIB for another GPU")
    count = int(found["count"] or 1)
    if count < 1:
        raise ConfigError(f"--gpus {text!r}: 0 GPUs hold nothing; use 1 or more")
    return Gpus(count, _gpu(found["name"], found["gib"]))


def _gpu(name: str, gib: str | None) -> Gpu:
    upper = name.upper()
    upper = _OTHER_NAMES.get(upper, upper)
    if gib is not None:
        try:
            size = float(gib)
        except ValueError:
            size = 0.0
        if size <= 0:
            raise ConfigError(f"--gpus {name}:{gib}: {gib!r} is not a size in GiB")
        return Gpu(upper, size)
    if upper not in KNOWN:
        raise ConfigError(
            f"--gpus {name}: its memory is not known here; write {name}:GIB, or one of {', '.join(KNOWN)}"
        )
    return Gpu(upper, KNOWN[upper])
