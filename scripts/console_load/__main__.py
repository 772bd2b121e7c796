"""Runs `python scripts/console_load …`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.path[:1] = [str(root / "scripts"), str(root / "tests")]
    from console_load.run import main

    sys.exit(main(sys.argv[1:]))
