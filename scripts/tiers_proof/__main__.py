"""Runs `python scripts/tiers_proof …`."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    folders = [str(root / name) for name in ("src", "scripts", "tests")]
    sys.path[:0] = folders
    # For the processes of engines, also those that vLLM starts anew.
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    from tiers_proof.run import main

    sys.exit(main(sys.argv[1:]))
