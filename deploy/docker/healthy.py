"""Whether the process of this container lives: a worker by its system port, a frontend by its own."""

import os
import sys
import urllib.request

TIMEOUT_SECONDS = 4


def url(environment: "os._Environ[str]") -> str:
    port = environment.get("DYN_SYSTEM_PORT") or environment.get("DYN_HTTP_PORT") or "8000"
    return f"http://127.0.0.1:{port}/live"


def main() -> int:
    try:
        with urllib.request.urlopen(url(os.environ), timeout=TIMEOUT_SECONDS):
            return 0
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{url(os.environ)}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
