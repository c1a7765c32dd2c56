"""Write the data of the recipe `tools`: prompts, held-out prompts, and lessons for the warm start (single turns, with what came before).

Half of the lessons are wrong on purpose: they ask for the price of the other number, or add the wrong one. The warm start so teaches how
tools are called, and leaves it to rewards what to call them with.

    python scripts/prices_data.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from rolemesh.recipes.prices import price

FOLDER = Path(__file__).parents[1] / "src" / "rolemesh" / "recipes" / "tools"
END = "<eos>"
RIGHT = 0.45
LESSONS, TRAIN, EVAL = 700, 1500, 200


def prompt(item: int, extra: int) -> str:
    return f"Price of item {item} plus {extra}: "


def lessons(item: int, extra: int, dice: random.Random) -> Iterator[dict[str, str]]:
    asked = item if dice.random() < RIGHT else extra
    yield {"prompt": prompt(item, extra), "answer": f"price({asked})"}
    head = f"{prompt(item, extra)}price({item}){END}\n{price(item)}\n"
    added = price(item) if dice.random() < RIGHT else item
    yield {"prompt": head, "answer": f"calculator('{added}+{extra}')"}
    total = price(item) + extra
    yield {"prompt": f"{head}calculator('{price(item)}+{extra}'){END}\n{total}\n", "answer": str(total)}


def write(name: str, rows: list[dict[str, str]]) -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    dice = random.Random(0)
    pairs = [(item, extra) for item in range(10, 100) for extra in range(10, 100) if item != extra]
    dice.shuffle(pairs)
    held_out, train, taught = pairs[:EVAL], pairs[EVAL : EVAL + TRAIN], pairs[EVAL + TRAIN : EVAL + TRAIN + LESSONS]
    for name, chosen in (("eval.jsonl", held_out), ("train.jsonl", train)):
        write(name, [{"prompt": prompt(item, extra), "answer": str(price(item) + extra)} for item, extra in chosen])
    write("lessons.jsonl", [lesson for item, extra in taught for lesson in lessons(item, extra, dice)])


if __name__ == "__main__":
    main()
