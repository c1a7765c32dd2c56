"""The plan as a picture. Called by `rolemesh plan`.

Reads nothing but the plan. Repeats are collapsed (equal nodes into one box, equal slots into one cell), so that ten thousand workers
still fit on a screen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from rolemesh.names import ACTOR, CRITIC, REF, REWARD, ROLLOUT, TEACHER
from rolemesh.plan.as_json import memory_name
from rolemesh.plan.balance import seconds
from rolemesh.plan.ledger import amounts_text, many, number
from rolemesh.plan.memory import size
from rolemesh.plan.routes import ROUTE_WORDS, why
from rolemesh.plan.schema import NodeInfo, Plan, Slot, WorkerPlan

_STYLES: Final = {ACTOR: "cyan", ROLLOUT: "green", REF: "blue", CRITIC: "magenta", REWARD: "yellow", TEACHER: "bright_blue"}
_CELLS: Final = 4
"""Equal slots of a node that are drawn one by one; more are drawn as one cell."""
_BOXES: Final = 16
"""Boxes of nodes; where runs of equal neighbours make more, equal nodes share a box wherever they stand."""
_RANGES: Final = 6
"""Ranges of ranks in a cell; the rest is counted."""


def render_plan(plan: Plan, console: Console) -> None:
    """Draw the plan: roles, nodes with their slots, memory, derived sizes, warnings and problems."""
    cpus, gpus = sum(node.cpus for node in plan.nodes), sum(node.gpus for node in plan.nodes)
    what = f"{many(len(plan.nodes), 'node')}, {many(cpus, 'CPU')}, {many(gpus, 'GPU')}"
    console.print(Text.assemble(("Plan ", "bold"), f"for {plan.origin}: {what}"))
    if plan.workers:
        console.print(_roles_table(plan))
        if ways := _weight_ways(plan):
            console.print(Text(f"weights reach {ways}", style="dim"))
        console.print(Group(*_node_boxes(plan)))
    if plan.memory:
        console.print(_memory_table(plan))
    if plan.stages:
        console.print(_stages_table(plan))
    if plan.derived:
        console.print(_derived_table(plan))
    if plan.versions:
        console.print(Text(f"versions: {', '.join(f'{name} {version}' for name, version in plan.versions.items())}", style="dim"))
    for warning in plan.warnings:
        console.print(Text.assemble(("warning ", "bold yellow"), warning))
    for problem in plan.problems:
        console.print(Text.assemble(("problem ", "bold red"), str(problem)))


def ranges(numbers: Iterable[int], most: int | None = None) -> str:
    """`0-7, 9` for 0..7 and 9; the numbers must ascend. Beyond `most` ranges the numbers left out are counted."""
    runs: list[tuple[int, int]] = []
    for number_ in numbers:
        if runs and number_ == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number_
        else:
            runs.append((number_, number_))
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:most]]
    left = sum(last - first + 1 for first, last in runs[len(texts) :])
    return ", ".join(texts) + (f", … ({left} more)" if left else "")


def _styled(role: str, text: str) -> Text:
    return Text(text, style=_STYLES.get(role, "white"))


def _each(values: Iterable[float]) -> str:
    """The common value, or the span of different ones."""
    low, high = min(values := list(values)), max(values)
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def _right(name: str) -> Column:
    return Column(name, justify="right")


def _roles_table(plan: Plan) -> Table:
    columns = "role", "pool", "nodes", _right("workers"), "ranks", _right("CPUs each"), _right("GPUs each")
    table = Table(*columns, title="Roles", title_justify="left")
    by_role: dict[str, list[WorkerPlan]] = {}
    for worker in plan.workers:
        by_role.setdefault(worker.role, []).append(worker)
    for role, workers in by_role.items():
        nodes = [plan.nodes[node].name for node in dict.fromkeys(worker.node for worker in workers)]
        parts = plan.layouts[role].tensor_parallel
        table.add_row(
            _styled(role, role),
            workers[0].pool if workers[0].slot is not None else f"{workers[0].pool} (beside slots)",
            _node_names(nodes),
            str(len(workers)) if parts == 1 else f"{len(workers)} = {len(workers) // parts} x {parts}",
            ranges((worker.rank for worker in workers), _RANGES),
            _each(worker.cpus for worker in workers),
            _each(worker.gpus for worker in workers),
        )
    _add_helpers(table, plan)
    table.add_section()
    total = plan.derived
    cpus, processes = f"{number(float(total['cpus']))} in all", many(float(total["processes"]), "process")
    table.add_row("total", "", "", str(len(plan.workers)), processes, cpus, f"{total['gpus']} in all")
    return table


def _weight_ways(plan: Plan) -> str:
    """`rollout 0-1 in the actor's process; rollout 2 through shared memory in bfloat16 (the actor's node)`."""
    ranks: dict[tuple[str, str], list[int]] = {}
    home = next((worker.node for worker in plan.workers if worker.role == ACTOR), None)
    for worker in plan.workers:
        if worker.weights is not None:
            sent = f" in {worker.weight_format}" if worker.weight_format else ""
            reason = why(worker.weights, same_node=worker.node == home)
            ranks.setdefault((worker.role, ROUTE_WORDS[worker.weights] + sent + (f" ({reason})" if reason else "")), []).append(worker.rank)
    return "; ".join(f"{role} {ranges(found, _RANGES)} {way}" for (role, way), found in ranks.items())


def _add_helpers(table: Table, plan: Plan) -> None:
    nodes: dict[str, list[str]] = {}
    for helper in plan.helpers:
        nodes.setdefault(helper.name, []).append(plan.nodes[helper.node].name)
    for name, names in nodes.items():
        table.add_row(name, "(helper)", _node_names(names), str(len(names)), "", "0", "0")


def _node_names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]} ({len(names)})"


@dataclass(slots=True)
class _Cell:
    """Equal slots of one node, or the processes of one role beside the slots."""

    title: str
    count: int
    roles: dict[str, list[int]]
    needs: dict[str, float]
    """Of one of them: CPUs, GPUs and other resources."""

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.title, self.count, tuple(self.needs.items()), tuple((role, len(ranks)) for role, ranks in self.roles.items())


def _node_boxes(plan: Plan) -> Iterator[RenderableType]:
    cells, needs, labels = _cells(plan), _host_needs(plan), _labels(plan)

    def shape(index: int) -> tuple[Any, ...]:
        node = plan.nodes[index]
        facts = node.cpus, node.gpus, node.gpu_type, node.memory_bytes, labels[index], tuple(node.resources.items())
        return *facts, needs.get(index), tuple(cell.shape for cell in cells.get(index, []))

    for members in _alike([shape(index) for index in range(len(plan.nodes))]):
        nodes = [plan.nodes[index] for index in members]
        if members[0] in cells:
            yield _node_box(nodes, [cells[index] for index in members], needs.get(members[0], 0), labels[members[0]])
        else:
            yield Text(f"{_node_names([node.name for node in nodes])}: not used", style="dim")


def _labels(plan: Plan) -> list[tuple[tuple[str, str], ...]]:
    """Labels of each node that tell kinds of nodes apart: without those, such as an id, that differ on all of several nodes."""
    values: dict[str, list[str]] = {}
    for node in plan.nodes:
        for key, value in node.labels.items():
            if key != "ray.io/node-id":  # differs on all nodes, and on one as well
                values.setdefault(key, []).append(value)
    kinds = {key for key, found in values.items() if len(found) == 1 or len(set(found)) < len(found)}
    return [tuple((key, value) for key, value in node.labels.items() if key in kinds) for node in plan.nodes]


def _alike(shapes: Sequence[tuple[Any, ...]]) -> list[list[int]]:
    """Positions of equal shapes together: runs of neighbours, or all there are where the runs would be too many."""
    runs = [list(run) for _, run in itertools.groupby(range(len(shapes)), key=lambda index: shapes[index])]
    if len(runs) <= _BOXES:
        return runs
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for index, shape in enumerate(shapes):
        kinds.setdefault(shape, []).append(index)
    return list(kinds.values())


def _cells(plan: Plan) -> dict[int, list[_Cell]]:
    """Node -> its cells: neighbouring slots of a pool with the same roles and sizes together, spares, then processes beside the slots."""
    ranks: dict[tuple[str, int], dict[str, int]] = {}
    beside: dict[tuple[int, str], list[WorkerPlan]] = {}
    for worker in plan.workers:
        if worker.slot is None:
            beside.setdefault((worker.node, worker.role), []).append(worker)
        else:
            ranks.setdefault((worker.pool, worker.slot), {})[worker.role] = worker.rank
    cells: dict[int, list[_Cell]] = {}
    for name, pool in plan.pools.items():
        for (node, roles), run in itertools.groupby(pool.slots, key=lambda slot: (slot.node, tuple(ranks.get((name, slot.index), ())))):
            slots = list(run)
            cell_ranks = {role: [ranks[name, slot.index][role] for slot in slots] for role in roles}
            cells.setdefault(node, []).append(_Cell(f"pool {name}", len(slots), cell_ranks, _needs(slots[0])))
        for node, run in itertools.groupby(pool.spares, key=lambda slot: slot.node):
            slots = list(run)
            cells.setdefault(node, []).append(_Cell(f"pool {name}, spare", len(slots), {}, _needs(slots[0])))
    for (node, role), workers in beside.items():
        cell = _Cell("beside slots", len(workers), {role: [worker.rank for worker in workers]}, _needs(workers[0]))
        cells.setdefault(node, []).append(cell)
    return cells


def _needs(place: Slot | WorkerPlan) -> dict[str, float]:
    return {"CPU": place.cpus, "GPU": place.gpus, **place.resources}


def _host_needs(plan: Plan) -> dict[int, int]:
    by_name = {(entry.pool, entry.process): entry.host_bytes for entry in plan.memory}
    needs: dict[int, int] = {}
    for name, pool in plan.pools.items():
        for slot in (*pool.slots, *pool.spares):
            needs[slot.node] = needs.get(slot.node, by_name.get(("", "node"), 0)) + by_name.get((name, "slot"), 0)
    for worker in plan.workers:
        if worker.slot is None:
            needs[worker.node] = needs.get(worker.node, 0) + by_name.get((worker.pool, worker.role), 0)
    return needs


def _node_box(nodes: list[NodeInfo], cells: list[list[_Cell]], need: int, labels: tuple[tuple[str, str], ...]) -> Panel:
    """One node, or several of the same shape, as a box of cells."""
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
    title = node.name if not several else f"{_node_names([node.name for node in nodes])}, each"
    facts = [*_used(node, cells[0]), *(f"{key}={value}" for key, value in labels), f"about {size(need)} of {size(node.memory_bytes)}"]
    subtitle = " · ".join(facts)
    return Panel(Columns(panels), title=title, title_align="left", subtitle=subtitle, subtitle_align="left", expand=False)


def _used(node: NodeInfo, cells: list[_Cell]) -> Iterator[str]:
    taken = {name: sum(cell.count * cell.needs.get(name, 0) for cell in cells) for name in ("CPU", "GPU", *node.resources)}
    yield f"{number(taken['CPU'])} of {number(node.cpus)} CPUs"
    if node.gpus or node.gpu_type:
        yield f"{number(taken['GPU'])} of {node.gpus} GPUs {node.gpu_type}".rstrip()
    yield from (f"{number(taken[name])} of {number(total)} {name}" for name, total in node.resources.items())


def _cell_panel(cell: _Cell, title: str, roles: dict[str, list[int]], *, each: bool) -> Panel:
    lines = [_styled(role, f"{role} {ranges(ranks, _RANGES)}") for role, ranks in roles.items()] or [Text("empty", style="dim")]
    sizes = amounts_text(cell.needs).replace(" and ", ", ")
    lines.append(Text(sizes + (" each" if each else ""), style="dim"))
    return Panel(Text("\n").join(lines), title=title, title_align="left", expand=False)


def _memory_table(plan: Plan) -> Table:
    table = Table("process", "role", "what", _right("size"), title="Memory of one process (estimate)", title_justify="left")
    for entry in plan.memory:
        for position, line in enumerate(entry.lines):
            where = " (GPU)" if line.on_gpu else ""
            table.add_row(memory_name(entry) if position == 0 else "", _styled(line.role, line.role), line.what + where, size(line.bytes))
        table.add_row(
            "", "", Text("total in host memory" if entry.phases else "total", style="bold"), Text(size(entry.host_bytes), style="bold")
        )
        for phase, count in entry.phase_bytes.items():
            style = "bold" if count == entry.gpu_bytes else ""
            table.add_row("", "", Text(f"at a time on GPU: {phase}", style=style), Text(size(count), style=style))
        table.add_section()
    return table


def _stages_table(plan: Plan) -> Table:
    title = f"Predicted step of {seconds(plan.seconds_per_step)} (rough, longest prompts and answers)"
    table = Table("role", "call", _right("workers"), _right("time"), "bound by", title=title, title_justify="left")
    for stage in plan.stages:
        table.add_row(_styled(stage.role, stage.role), stage.call, str(stage.workers), seconds(stage.seconds), stage.bound)
    return table


def _derived_table(plan: Plan) -> Table:
    table = Table("size", _right("value"), title="Derived sizes", title_justify="left", show_header=False)
    for name, value in plan.derived.items():
        table.add_row(name.replace("_", " "), value if isinstance(value, str) else f"{value:,.2f}".removesuffix(".00"))
    return table
