#!/usr/bin/env python3
"""Check that a finished run directory keeps its contract (docs/architecture.md, "The run directory").

    python tools/run_contract.py RUN_DIR [--min-steps N]

Prints one line for each thing that is off and exits 1; prints 'contract holds' and exits 0 otherwise. Needs only the standard library.
"""

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Iterator

REQUIRED = [
    "step",
    "reward/mean",
    "reward/std",
    "response_length/mean",
    "time/step",
    "throughput/tokens_per_second",
    "policy/ratio_first_minibatch_max_deviation",
    "rollout/logprob_gap_max",
    "weights/version",
    "samples/trained",
    "samples/lost",
    "samples/masked",
    "bottleneck/role",
    "bottleneck/reason",
]
FILES = ["config.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "trace.json", "summary.json"]


def problems(run: pathlib.Path, min_steps: int) -> Iterator[str]:
    for name in FILES:
        if not (run / name).is_file():
            yield f"missing {name}"
    if not list((run / "samples").glob("*.parquet")):
        yield "no samples/*.parquet"
    if not (run / "logs").is_dir():
        yield "no logs/"
    if not (run / "metrics.jsonl").is_file():
        return
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.strip()]
    steps = [r.get("step") for r in rows if "reward/mean" in r]
    if len(steps) < min_steps:
        yield f"{len(steps)} training rows in metrics.jsonl, expected at least {min_steps}"
    if steps != sorted(set(steps)):
        yield f"steps are not strictly increasing: {steps[:20]}"
    for row in rows:
        if "reward/mean" not in row:
            continue
        lacking = [k for k in REQUIRED if k not in row]
        if lacking:
            yield f"step {row.get('step')}: lacks {', '.join(lacking)}"
            break
        bad = [k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
        if bad:
            yield f"step {row['step']}: not finite: {', '.join(bad)}"
        if row["samples/lost"] != 0:
            yield f"step {row['step']}: samples/lost is {row['samples/lost']}"
        if row["policy/ratio_first_minibatch_max_deviation"] > 1e-4:
            yield f"step {row['step']}: first-minibatch ratio deviates by {row['policy/ratio_first_minibatch_max_deviation']}"
        if not any(k.startswith("time/") and k.count("/") >= 2 for k in row):
            yield f"step {row['step']}: no time/<role>/<call> keys"
    trace = run / "trace.json"
    if trace.is_file():
        data = json.loads(trace.read_text())
        events = data["traceEvents"] if isinstance(data, dict) else data
        if not [e for e in events if e.get("ph") in ("X", "B")]:
            yield "trace.json has no duration events"
    events = run / "events.jsonl"
    if events.is_file():
        for number, line in enumerate(events.read_text().splitlines(), 1):
            entry = json.loads(line)
            if not {"time", "stage", "subject"} <= set(entry):
                yield f"events.jsonl line {number}: needs time, stage and subject, has {sorted(entry)}"
                break


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("--min-steps", type=int, default=1)
    args = parser.parse_args()
    found = list(problems(args.run, args.min_steps))
    print("\n".join(found[:30]) or "contract holds")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
