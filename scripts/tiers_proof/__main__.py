"""Runs `python scripts/tiers_proof …`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    for folder in ("tests", "scripts", "src"):
        sys.path.insert(0, str(root / folder))
    from tiers_proof.run import main

    sys.exit(main(sys.argv[1:]))
