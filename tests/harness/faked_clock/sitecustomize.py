"""For processes below libfaketime 0.9.10, which refuses the way in which Python sleeps (EINVAL)."""

import select
import time
from typing import SupportsIndex


def sleep(seconds: SupportsIndex | float, /) -> None:
    select.select([], [], [], float(seconds))


time.sleep = sleep
