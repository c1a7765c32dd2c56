"""Every error rolemesh raises on purpose, in one tree.

    RolemeshError                exit code 4, unless given
    ├── ConfigError              2   the config (or data, or model folder it names) cannot be used; lists all problems
    ├── ResourceError            3   the resources cannot satisfy the plan; lists all problems
    ├── BatchError                   columns or rows do not fit together
    ├── DeadlineExceeded             a wait ended; says who waited for whom and since when
    ├── WorkerError                  a worker's method raised; carries the original type, message and traceback
    │   └── WorkerDied               the worker's process is gone
    ├── DataLost                     stored columns are gone with the process or node that held them
    ├── NotJoined                    a call needs all ranks of a group that has no communicator now
    ├── StaleCall                    a call of an older controller epoch or group generation was refused
    ├── StaleWeights                 an engine was asked for another weight version than it holds
    ├── StaleWrite                   a fact of an older group generation was refused by the KV store
    ├── ValueRefused                 a value is too large for the KV store, or not plain
    ├── LeaseExpired                 a fact was to be bound to a lease that has run out
    ├── Unavailable                  a request from outside is not answered, with the reason
    │   ├── Overloaded               too many are open; says when to ask again
    │   ├── RequestRefused           the engine cannot serve what it asks for
    │   └── RequestFailed            engines raise with it, also when it is alone; names what they raise
    ├── Deadlock                     a wait for resources would never end: the holders wait for each other
    ├── StandStill                   nothing can happen any more in a simulation
    └── RunStopped                   the run ended on purpose (policy), with the reason

Errors travel between processes, so each one pickles: a subclass takes keyword fields only and composes its message from them.
Messages say what was found, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with a config or a plan.

    `subject` names the thing (a config key such as ``trainer.steps``, a pool, a role), `need` what is required, `free` (or found)
    what there is, and `remedy` what the user can do about it.
    """

    subject: str
    need: str
    free: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.subject}: {self.need}"
        if self.free:
            text += f"; found {self.free}"
        if self.remedy:
            text += f". {self.remedy}"
        return text


def _rebuild(cls: type[RolemeshError], fields: dict[str, Any]) -> RolemeshError:
    return cls(**fields)


class RolemeshError(Exception):
    """Base of all. Subclasses list their keyword fields in the signature of `message`."""

    exit_code: ClassVar[int] = 4

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        super().__init__(self.message(**fields))

    @classmethod
    def message(cls, **fields: Any) -> str:
        return str(fields.get("text", cls.__name__))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.fields)


class _ProblemsError(RolemeshError):
    def __init__(self, *, problems: Sequence[Problem]) -> None:
        super().__init__(problems=tuple(problems))
        self.problems = tuple(problems)

    @classmethod
    def message(cls, **fields: Any) -> str:
        return "\n".join(str(problem) for problem in fields["problems"])

    @classmethod
    def one(cls, subject: str, need: str, free: str = "", remedy: str = "") -> Self:
        """The error for a single problem."""
        return cls(problems=[Problem(subject=subject, need=need, free=free, remedy=remedy)])


class ConfigError(_ProblemsError):
    """The config, or data or a model folder that it names, cannot be used. Raised before any process starts."""

    exit_code = 2


class ResourceError(_ProblemsError):
    """The machine or cluster cannot hold the plan. Raised before any process of the run starts."""

    exit_code = 3


class BatchError(RolemeshError):
    """Columns or rows do not fit together: names the columns and the first differing row."""

    def __init__(self, text: str) -> None:
        super().__init__(text=text)


class DeadlineExceeded(RolemeshError):
    """A wait ended without result. For the call of a group its name, and the ranks that did not answer."""

    def __init__(
        self, *, waiter: str, subject: str, seconds: float, last_report: str = "", group: str = "", ranks: tuple[int, ...] = ()
    ) -> None:
        super().__init__(waiter=waiter, subject=subject, seconds=seconds, last_report=last_report, group=group, ranks=ranks)

    @classmethod
    def message(cls, **fields: Any) -> str:
        report = f" Last report: {fields['last_report']}" if fields.get("last_report") else ""
        return f"{fields['waiter']} waited {fields['seconds']:.1f} s for {fields['subject']} and gave up.{report}"


class WorkerError(RolemeshError):
    """A worker's method raised. The last lines a user sees name role, rank, node and the original exception."""

    def __init__(
        self,
        *,
        group: str,
        rank: int,
        node: str,
        pid: int,
        method: str,
        original_type: str,
        original_message: str,
        original_traceback: str = "",
        log_path: str = "",
        log_tail: str = "",
    ) -> None:
        super().__init__(
            group=group,
            rank=rank,
            node=node,
            pid=pid,
            method=method,
            original_type=original_type,
            original_message=original_message,
            original_traceback=original_traceback,
            log_path=log_path,
            log_tail=log_tail,
        )

    @property
    def original_type(self) -> str:
        return str(self.fields["original_type"])

    @property
    def original_traceback(self) -> str:
        return str(self.fields["original_traceback"])

    @classmethod
    def message(cls, **fields: Any) -> str:
        where = f"{fields['group']} rank {fields['rank']} (node {fields['node']}, pid {fields['pid']}) in {fields['method']}()"
        lines = [f"{where}: {fields['original_type']}: {fields['original_message']}"]
        if fields.get("log_path") and not fields.get("log_tail"):
            lines.append(f"log: {fields['log_path']}")
        if fields.get("log_tail"):
            lines += [f"last lines of {fields['log_path']}:", *(f"  {line}" for line in str(fields["log_tail"]).splitlines())]
        return "\n".join(lines)


class WorkerDied(WorkerError):
    """The worker's process ended (killed, out of memory, crashed) while a call was under way or expected."""


class DataLost(RolemeshError):
    """Stored columns or objects are gone: the process or node that held them died. The phase that wrote them is to be repeated."""

    def __init__(self, *, waiter: str, cause: str) -> None:
        super().__init__(waiter=waiter, cause=cause)

    @classmethod
    def message(cls, **fields: Any) -> str:
        return f"{fields['waiter']} needs stored values that are gone ({fields['cause']}). Repeat the phase that wrote them"


class NotJoined(RolemeshError):
    """A call to all ranks of a group whose communicator has not formed, or was cut since."""

    def __init__(self, *, group: str, method: str) -> None:
        super().__init__(group=group, method=method)

    @classmethod
    def message(cls, **fields: Any) -> str:
        return (
            f"{fields['group']}.{fields['method']}() refused: the ranks of {fields['group']} have no communicator (not joined yet, or cut "
            "after a failed or late call, an abort or a replacement). Call rejoin() on the group first"
        )


class StaleCall(RolemeshError):
    """A call carried an older controller epoch or group generation than the worker has seen. `rank` is None for a whole process, whose
    name is the group then."""

    def __init__(self, *, group: str, rank: int | None, got: tuple[int, int], current: tuple[int, int]) -> None:
        super().__init__(group=group, rank=rank, got=got, current=current)

    @classmethod
    def message(cls, **fields: Any) -> str:
        rank = f" rank {fields['rank']}" if fields["rank"] is not None else ""
        return (
            f"{fields['group']}{rank} refused a call of (epoch, generation) {fields['got']}: it already serves "
            f"{fields['current']}. The caller is an older controller or holds an older group"
        )


class StaleWeights(RolemeshError):
    """An engine holds another weight version than the one asked for. Never served."""

    def __init__(self, *, where: str, holds: int, asked: int) -> None:
        super().__init__(where=where, holds=holds, asked=asked)

    @classmethod
    def message(cls, **fields: Any) -> str:
        return (
            f"{fields['where']} holds weight version {fields['holds']}, asked for {fields['asked']}. "
            "Publish the weights to it before generating"
        )


class StaleWrite(RolemeshError):
    """A write to the KV store on behalf of an older generation of a group than the store knows of. The late writer was replaced."""

    def __init__(self, *, writer: str, key: str, group: str, got: int, current: int) -> None:
        super().__init__(writer=writer, key=key, group=group, got=got, current=current)

    @classmethod
    def message(cls, **fields: Any) -> str:
        return (
            f"{fields['writer']} may not write {fields['key']!r}: it speaks for generation {fields['got']} of group {fields['group']}, "
            f"which is at generation {fields['current']} by now. It was replaced, or holds an older group"
        )


class ValueRefused(RolemeshError):
    """The KV store takes small plain values only."""

    def __init__(self, *, key: str, found: str, need: str) -> None:
        super().__init__(key=key, found=found, need=need)

    @classmethod
    def message(cls, **fields: Any) -> str:
        return (
            f"value of {fields['key']!r} refused: it must be {fields['need']}; found {fields['found']}. Let a worker method return large "
            "objects, which then travel by reference"
        )


class LeaseExpired(RolemeshError):
    """The lease of the KV store is over: it was not kept alive in time, or given back."""

    def __init__(self, *, holder: str, seconds: float) -> None:
        super().__init__(holder=holder, seconds=seconds)

    @classmethod
    def message(cls, **fields: Any) -> str:
        return f"the lease of {fields['holder']} ({fields['seconds']:g} s) has run out or was given back. Take a new one"


class Unavailable(RolemeshError):
    """A request from outside is not answered, for the reason given."""

    def __init__(self, text: str, **more: Any) -> None:
        super().__init__(text=text, **more)


class Overloaded(Unavailable):
    """Too many requests from outside are open. `retry_after` are the seconds after which to ask again."""

    @property
    def retry_after(self) -> int:
        return int(self.fields["retry_after"])


class RequestRefused(Unavailable):
    """The engine cannot serve what a request from outside asks for."""


class RequestFailed(Unavailable):
    """An engine has raised with a request from outside among others, and then one with it alone. `exception` is the type's name."""

    @property
    def exception(self) -> str:
        return str(self.fields["exception"])


class Deadlock(RolemeshError):
    """A request for resources that could never be served, because those who hold them wait themselves. Refused before it waits."""

    def __init__(self, *, who: str, wanted: str, cycle: Sequence[str]) -> None:
        super().__init__(who=who, wanted=wanted, cycle=tuple(cycle))

    @classmethod
    def message(cls, **fields: Any) -> str:
        return (
            f"{fields['who']} asked for {fields['wanted']} and would wait for ever: {'; '.join(fields['cycle'])}. "
            "Give something back first, or let everyone acquire in the same order"
        )


class StandStill(RolemeshError):
    """Nothing can happen any more in a simulation, or it went past its limit. A real program would wait for ever."""

    def __init__(self, *, reason: str, tasks: Sequence[str]) -> None:
        super().__init__(reason=reason, tasks=tuple(tasks))

    @classmethod
    def message(cls, **fields: Any) -> str:
        return "\n".join((f"the simulation stands still: {fields['reason']}. Tasks that wait:", *(f"  {task}" for task in fields["tasks"])))


class RunStopped(RolemeshError):
    """The run was ended by a policy of the user (for example `algorithm.no_signal: stop`)."""

    def __init__(self, text: str) -> None:
        super().__init__(text=text)
