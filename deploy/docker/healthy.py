"""Whether the process of this container lives: a worker by its system port, a frontend by its own."""

import http.client
import os
import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT_SECONDS = 4


def url(environment: "os._Environ[str]") -> str:
    port = environment.get("DYN_SYSTEM_PORT") or environment.get("DYN_HTTP_PORT") or "8000"
    return f"http://127.0.0.1:{port}/live"


def ask(address: str) -> None:
    # The certificate of a frontend is for another name than this address.
    context = ssl._create_unverified_context()
    urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS, context=context).close()


def main() -> int:
    address = url(os.environ)
    try:
        try:
            ask(address)
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException):  # it may speak TLS
            ask(address.replace("http:", "https:", 1))
    except (OSError, ValueError, http.client.HTTPException) as error:
        sys.stderr.write(f"{address}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
