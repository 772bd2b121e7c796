"""Makes what the engines of a case need: models, other weights, models that draft, adapters."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpu import guessing
from harness.adapters import make_adapter
from tiers_proof import models
from tiers_proof.case import Case


@dataclass
class Ingredients:
    """Makes each thing once, for all threads."""

    folder: Path
    _making: threading.RLock = field(default_factory=threading.RLock)

    def model(self, case: Case, seed: int | None) -> Path:
        """A case that changes weights gets a folder of its own, in which they are as `seed` says."""
        with self._making:
            made = models.make(case.model, self.folder / "models" / case.model)
            if not case.has_own_folder:
                return made
            own = self.folder / "models" / f"{case.name}-own"
            if not own.exists():
                shutil.copytree(made, own)
            right = made if seed is None else self.other_weights(case, seed)
            shutil.copy2(right / "model.safetensors", own)
            return own

    def other_weights(self, case: Case, seed: int) -> Path:
        with self._making:
            folder = self.folder / "models" / f"{case.model}-{seed}"
            base = self.folder / "models" / case.model
            return folder if folder.exists() else models.change_weights(base, folder, seed)

    def drafting(self, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Makes the model that drafts, if it needs one."""
        method = config["method"]
        if method not in guessing.MAKERS:
            return dict(config)
        with self._making:
            made = self.folder / "models" / f"{folder.name}-{method}"
            return {**config, "model": str(made if made.exists() else guessing.make(method, made, folder))}

    def adapters(self, case: Case, base: Path, seed: int) -> dict[str, tuple[str, str]]:
        """Returns folders and contents by name. The folders are the same for all seeds but 9."""
        made = {}
        for number, name in enumerate("ab"):
            folder = self.folder / "adapters" / case.name / (f"{name}-9" if seed == 9 else name)
            make_adapter(folder, base, seed=2 * seed + number)
            made[name] = str(folder), f"{seed:02}{number:02}" * 16
        return made
