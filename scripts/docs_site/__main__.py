"""Runs `python scripts/docs_site [--serve]`, which builds the documentation as a site in build/site."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    from docs_site.build import main

    sys.exit(main(sys.argv[1:]))
