"""A worker that takes some seconds, and the same without a worker; see `datastore_requests.py`."""

import time


def sleep() -> None:
    """Take five seconds."""
    time.sleep(5.0)


if __name__ == "__main__":
    sleep()
