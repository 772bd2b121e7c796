"""`python scripts/demo …`: every step of the demo models."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    from demo.make import main

    sys.exit(main(sys.argv[1:]))
