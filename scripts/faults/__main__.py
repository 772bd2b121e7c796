"""Runs `python scripts/faults …`, the command of `make faults`."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.path[:1] = [str(root / "scripts"), str(root / "tests")]
    # httpx reads all authorities for each client; here nobody speaks anything but plain HTTP.
    os.environ["SSL_CERT_DIR"] = str(root / "tests")
    from faults.run import main

    sys.exit(main(sys.argv[1:]))
