"""Tools of the tests."""

import time


def add(a: int, b: int = 1) -> int:
    """Adds.

    Args:
        a: A number
        b: Another
    """
    return a + b


async def later(text: str) -> dict:
    """Repeats.

    Args:
        text: Any
    """
    return {"text": text}


def gone(a: int) -> int:
    """Asks a service.

    Args:
        a: Any
    """
    raise ConnectionRefusedError("no route to the index")


def wrong(a: int) -> int:
    """Fails.

    Args:
        a: Any
    """
    raise KeyError(a)


def slow(seconds: float) -> str:
    """Sleeps.

    Args:
        seconds: How long
    """
    time.sleep(seconds)
    return "awake"


def undocumented(a: int) -> int:
    return a


number = 3
