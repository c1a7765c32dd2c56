"""The plan as JSON and as a picture. Called by `rolemesh plan`, and by sessions for `plan.json`.

Both read nothing but the plan. Repeats are collapsed (equal neighbouring nodes into one box, equal slots into one cell), so that ten
thousand workers still fit on a screen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rolemesh.names import ACTOR, CRITIC, REF, REWARD, ROLLOUT, TEACHER
from rolemesh.plan.ledger import number
from rolemesh.plan.memory import size
from rolemesh.plan.schema import NodeInfo, Plan, PoolMemory, WorkerPlan

_STYLES: Final = {ACTOR: "cyan", ROLLOUT: "green", REF: "blue", CRITIC: "magenta", REWARD: "yellow", TEACHER: "bright_blue"}
_CELLS: Final = 4
"""Equal slots of a node that are drawn one by one; more are drawn as one cell."""


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data for `plan.json` and `rolemesh plan --json`. Nodes are named; bytes are bytes."""
    return {
        "origin": plan.origin,
        "nodes": [asdict(node) for node in plan.nodes],
        "pools": {
            name: {"slots": [{**asdict(slot), "node": plan.nodes[slot.node].name} for slot in pool.slots]}
            for name, pool in plan.pools.items()
        },
        "workers": [
            {
                "role": worker.role,
                "rank": worker.rank,
                "pool": worker.pool,
                "node": plan.nodes[worker.node].name,
                "slot": worker.slot,
                "cpus": worker.cpus,
                "gpus": worker.gpus,
            }
            for worker in plan.workers
        ],
        "memory": {_memory_name(entry): _memory_json(entry) for entry in plan.memory},
        "derived": dict(plan.derived),
        "warnings": list(plan.warnings),
        "problems": [asdict(problem) for problem in plan.problems],
    }


def _memory_name(entry: PoolMemory) -> str:
    """The pool for one of its slots; `pool/role` for a process beside the slots."""
    return entry.pool if entry.process == "slot" else f"{entry.pool}/{entry.process}"


def _memory_json(entry: PoolMemory) -> dict[str, Any]:
    lines = [asdict(line) for line in entry.lines]
    return {"total_bytes": entry.total_bytes, "host_bytes": entry.host_bytes, "gpu_bytes": entry.gpu_bytes, "lines": lines}


def render_plan(plan: Plan, console: Console) -> None:
    """Draw the plan: roles, nodes with their slots, memory, derived sizes, warnings and problems."""
    cpus, gpus = sum(node.cpus for node in plan.nodes), sum(node.gpus for node in plan.nodes)
    what = f"{_many(len(plan.nodes), 'node')}, {_many(cpus, 'CPU')}, {_many(gpus, 'GPU')}"
    console.print(Text.assemble(("Plan ", "bold"), f"for {plan.origin}: {what}"))
    if plan.workers:
        console.print(_roles_table(plan))
        console.print(Group(*_node_boxes(plan)))
    if plan.memory:
        console.print(_memory_table(plan))
    if plan.derived:
        console.print(_derived_table(plan))
    for warning in plan.warnings:
        console.print(Text.assemble(("warning ", "bold yellow"), warning))
    for problem in plan.problems:
        console.print(Text.assemble(("problem ", "bold red"), str(problem)))


def _many(count: float, thing: str) -> str:
    return f"{number(count)} {thing}{'' if count == 1 else 's'}"


def ranges(numbers: Iterable[int]) -> str:
    """`0-7, 9` for 0..7 and 9; the numbers must ascend."""
    parts = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        values = [value for _, value in run]
        parts.append(str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}")
    return ", ".join(parts)


def _styled(role: str, text: str) -> Text:
    return Text(text, style=_STYLES.get(role, "white"))


def _each(values: Iterable[float]) -> str:
    """The common value, or the span of different ones."""
    low, high = min(values := list(values)), max(values)
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def _roles_table(plan: Plan) -> Table:
    table = Table(title="Roles", title_justify="left", expand=False)
    for column in ("role", "pool", "nodes", "workers", "ranks", "CPUs each", "GPUs each"):
        table.add_column(column, justify="left" if column in ("role", "pool", "nodes", "ranks") else "right")
    by_role: dict[str, list[WorkerPlan]] = {}
    for worker in plan.workers:
        by_role.setdefault(worker.role, []).append(worker)
    for role, workers in by_role.items():
        nodes = [plan.nodes[node].name for node in dict.fromkeys(worker.node for worker in workers)]
        table.add_row(
            _styled(role, role),
            workers[0].pool if workers[0].slot is not None else f"{workers[0].pool} (beside slots)",
            _node_names(nodes),
            str(len(workers)),
            ranges(worker.rank for worker in workers),
            _each(worker.cpus for worker in workers),
            _each(worker.gpus for worker in workers),
        )
    table.add_section()
    total = plan.derived
    cpus, processes = f"{number(float(total['cpus']))} in all", f"{total['processes']} process{'es' if total['processes'] != 1 else ''}"
    table.add_row("total", "", "", str(len(plan.workers)), processes, cpus, f"{total['gpus']} in all")
    return table


def _node_names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]} ({len(names)})"


@dataclass(slots=True)
class _Cell:
    """Equal slots of one node, or the processes of one role beside the slots."""

    title: str
    count: int
    roles: dict[str, list[int]]
    cpus: float
    gpus: int

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.title, self.count, self.cpus, self.gpus, tuple((role, len(ranks)) for role, ranks in self.roles.items())


def _node_boxes(plan: Plan) -> Iterator[RenderableType]:
    cells = _cells(plan)
    needs = _host_needs(plan)

    def shape(index: int) -> tuple[Any, ...]:
        node = plan.nodes[index]
        return node.cpus, node.gpus, node.memory_bytes, needs.get(index), tuple(cell.shape for cell in cells.get(index, []))

    for _, run in itertools.groupby(range(len(plan.nodes)), key=shape):
        members = list(run)
        first = members[0]
        if first in cells:
            yield _node_box([plan.nodes[index] for index in members], [cells[index] for index in members], needs.get(first, 0))
        else:
            yield Text(f"{_node_names([plan.nodes[index].name for index in members])}: not used", style="dim")


def _cells(plan: Plan) -> dict[int, list[_Cell]]:
    """Node -> its cells: neighbouring slots of a pool with the same roles and sizes together, then processes beside the slots."""
    ranks: dict[tuple[str, int], dict[str, int]] = {}
    beside: dict[int, dict[str, list[WorkerPlan]]] = {}
    for worker in plan.workers:
        if worker.slot is None:
            beside.setdefault(worker.node, {}).setdefault(worker.role, []).append(worker)
        else:
            ranks.setdefault((worker.pool, worker.slot), {})[worker.role] = worker.rank
    cells: dict[int, list[_Cell]] = {}
    for name, pool in plan.pools.items():
        for (node, roles), run in itertools.groupby(pool.slots, key=lambda slot: (slot.node, tuple(ranks.get((name, slot.index), ())))):
            slots = list(run)
            cell_ranks = {role: [ranks[name, slot.index][role] for slot in slots] for role in roles}
            cells.setdefault(node, []).append(_Cell(f"pool {name}", len(slots), cell_ranks, slots[0].cpus, slots[0].gpus))
    for node, by_role in beside.items():
        for role, workers in by_role.items():
            cell = _Cell("beside slots", len(workers), {role: [worker.rank for worker in workers]}, workers[0].cpus, 0)
            cells.setdefault(node, []).append(cell)
    return cells


def _host_needs(plan: Plan) -> dict[int, int]:
    """Estimated bytes of node memory by node."""
    by_name = {(entry.pool, entry.process): entry.host_bytes for entry in plan.memory}
    needs: dict[int, int] = {}
    for name, pool in plan.pools.items():
        for slot in pool.slots:
            needs[slot.node] = needs.get(slot.node, 0) + by_name.get((name, "slot"), 0)
    for worker in plan.workers:
        if worker.slot is None:
            needs[worker.node] = needs.get(worker.node, 0) + by_name.get((worker.pool, worker.role), 0)
    return needs


def _node_box(nodes: list[NodeInfo], cells: list[list[_Cell]], need: int) -> Panel:
    """One node, or several neighbours of the same shape, as a box of cells."""
    node, several = nodes[0], len(nodes) > 1
    panels: list[RenderableType] = []
    for position, cell in enumerate(cells[0]):
        if several or cell.count > _CELLS:
            every = {role: [rank for node_cells in cells for rank in node_cells[position].roles[role]] for role in cell.roles}
            title = f"{cell.title}: {cell.count}" + (" a node" if several else "")
            panels.append(_cell_panel(cell, title, every, each=cell.count > 1 or several))
        else:
            for index in range(cell.count):
                ranks = {role: ranks[index : index + 1] for role, ranks in cell.roles.items()}
                panels.append(_cell_panel(cell, cell.title, ranks, each=False))
    used = sum(cell.count * cell.cpus for cell in cells[0])
    gpus = sum(cell.count * cell.gpus for cell in cells[0])
    facts = [f"{number(used)} of {number(node.cpus)} CPUs"]
    facts += [f"{gpus} of {node.gpus} GPUs {node.gpu_type}".rstrip()] if node.gpus else []
    facts.append(f"about {size(need)} of {size(node.memory_bytes)}")
    title = node.name if not several else f"{_node_names([node.name for node in nodes])}, each"
    return Panel(Columns(panels), title=title, title_align="left", subtitle=" · ".join(facts), subtitle_align="left", expand=False)


def _cell_panel(cell: _Cell, title: str, roles: dict[str, list[int]], *, each: bool) -> Panel:
    lines: list[Text] = [_styled(role, f"{role} {ranges(ranks)}") for role, ranks in roles.items()] or [Text("empty", style="dim")]
    sizes = f"{_many(cell.cpus, 'CPU')}" + (f", {_many(cell.gpus, 'GPU')}" if cell.gpus else "")
    lines.append(Text(sizes + (" each" if each else ""), style="dim"))
    return Panel(Text("\n").join(lines), title=title, title_align="left", expand=False)


def _memory_table(plan: Plan) -> Table:
    table = Table(title="Memory of one process (estimate)", title_justify="left", expand=False)
    table.add_column("process")
    table.add_column("role")
    table.add_column("what")
    table.add_column("size", justify="right")
    for entry in plan.memory:
        for position, line in enumerate(entry.lines):
            where = " (GPU)" if line.on_gpu else ""
            table.add_row(_memory_name(entry) if position == 0 else "", _styled(line.role, line.role), line.what + where, size(line.bytes))
        table.add_row("", "", Text("total", style="bold"), Text(size(entry.total_bytes), style="bold"))
        table.add_section()
    return table


def _derived_table(plan: Plan) -> Table:
    table = Table(title="Derived sizes", title_justify="left", expand=False, show_header=False)
    table.add_column("size")
    table.add_column("value", justify="right")
    for name, value in plan.derived.items():
        table.add_row(name.replace("_", " "), value if isinstance(value, str) else f"{value:,.2f}".removesuffix(".00"))
    return table
