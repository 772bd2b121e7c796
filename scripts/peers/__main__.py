"""`python scripts/peers …`, which is what `make bench-peers` runs."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    from peers.run import main

    sys.exit(main(sys.argv[1:]))
