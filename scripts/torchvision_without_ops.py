"""Lets a torchvision import whose compiled operators do not fit the installed torch.

PyPI has torchvision only as a CUDA build. Beside a CPU torch its library does not load, which torchvision
tolerates, but right after that it describes the operators `nms` and `qnms`, which then do not exist, and the
import fails. This hook declares the two just before. Transforms work as ever; calling the operators raises.

`setup.py` copies this file into the environment's site-packages together with a `.pth` that imports it: vLLM
spawns processes, and only a `.pth` reaches all of them.
"""

import sys

_FIRST_USERS = ("torchvision._autograd_registrations", "torchvision._meta_registrations")


class _DeclareMissingOperators:
    """Never finds a module; only acts when one of the first users of the operators is looked up."""

    def __init__(self) -> None:
        self.library: object = None  # torch forgets the declarations when this object goes

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in _FIRST_USERS and self.library is None and not _has_operators():
            from torch.library import Library

            self.library = library = Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _has_operators() -> bool:
    return bool(sys.modules["torchvision.extension"]._has_ops())


sys.meta_path.insert(0, _DeclareMissingOperators())
