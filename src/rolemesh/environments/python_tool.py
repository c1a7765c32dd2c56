"""The tool `python`: runs what the model wrote, confined and in a process of its own."""

from __future__ import annotations

from typing import Final

from rolemesh.environments.sandbox import sandbox_of_loop
from rolemesh.environments.sandbox_process import OUTPUT_BYTES
from rolemesh.environments.tools import ToolResult

_NOTHING: Final = "(no output; print what you want to see)"


async def python(code: str) -> ToolResult:
    """Runs a Python program and returns what it prints, or the value of an expression at its end. Nothing is kept from one program to the next, and there are neither files nor a network.

    Args:
        code: The program
    """  # noqa: E501 - a model reads it as one line
    result = await sandbox_of_loop().run(code)
    output, outcome = result.output.rstrip("\n"), result.outcome
    told = {  # first, as long results are cut at their end
        "ok": "",
        "error": f"error: {result.error}",
        "timeout": "error: the program took too long and was ended",
        "cut": f"error: the program printed more than {OUTPUT_BYTES} bytes and was ended; this is the beginning",
    }[outcome]
    counts = {"python_errors": outcome == "error", "python_timeouts": outcome == "timeout", "python_outputs_cut": outcome == "cut"}
    return ToolResult(text="\n".join(part for part in (told, output) if part) or _NOTHING, counts=counts)
