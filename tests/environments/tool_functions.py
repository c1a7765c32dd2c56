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


def leaves(code: int) -> str:
    """Ends its program, as command lines do.

    Args:
        code: Status
    """
    raise SystemExit(code)


def maybe(count: int | None = None) -> str:
    """May be given nothing.

    Args:
        count: Or none
    """
    return f"got {count}"


def placed(first: int, /, *, more: int = 2) -> int:
    """Takes one by its place alone.

    Args:
        first: By place
        more: By name
    """
    return first + more


def hidden_wait(text: str):
    """Returns what has to be awaited, as decorated functions do.

    Args:
        text: Any
    """
    return later(text)


def huge(size: int) -> str:
    """Says a lot.

    Args:
        size: How much
    """
    return "ab " * size


def half_a_character(text: str) -> str:
    """Returns what is no text in UTF-8.

    Args:
        text: Any
    """
    return text + "\ud800"


def raw(size: int) -> bytes:
    """Returns bytes.

    Args:
        size: How many
    """
    return bytes(range(size))


number = 3
