"""For processes below libfaketime 0.9.10, which refuses the way in which Python sleeps (EINVAL)."""

import select
import time


def sleep(seconds: float) -> None:
    select.select([], [], [], seconds)


time.sleep = sleep
