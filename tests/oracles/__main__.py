"""`make oracles`: every row of `rows.py` against the real system, in float64; the recorded numbers are checked too.

    python -m tests.oracles [--record] [--only WORD] [DIRECTORY]

DIRECTORY holds a virtual environment for each system (default: .oracles). --record writes what the systems answered to
`recorded.json`, which `make test` compares the library with where no system is installed. Exit status 1 if a row
differs from what it says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.oracles import options
from tests.oracles.cases import Numbers, case, case_id, difference, ours
from tests.oracles.record import load, save
from tests.oracles.rows import HERE, ROWS, SYSTEMS, Row


def answers(system: str, rows: list[Row], environments: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Versions, and results by case, from the system's own environment."""
    known = SYSTEMS[system]
    python = environments / known.environment / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        asked, told = Path(folder, "cases.json"), Path(folder, "results.json")
        asked.write_text(json.dumps([case(row, name) for row in rows for name in row.batches]))
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        done = subprocess.run([python, HERE / known.server, asked, told], env=clean, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{known.server} failed:\n{done.stdout[-3000:]}")
        found = json.loads(told.read_text())
    return found["versions"], found["results"]


def compare(row: Row, results: dict[str, Any]) -> tuple[float, float | None, str]:
    """The largest differences of value and gradient over the batches of a row, and what went wrong."""
    value, grad = 0.0, None
    for name in row.batches:
        theirs = results[case_id(row, name)]
        if "error" in theirs:
            return float("inf"), None, theirs["error"]
        mine = ours(row, name)
        if len(mine.values) != len(theirs["values"]):
            return float("inf"), None, f"{len(mine.values)} values, {len(theirs['values'])} of the system"
        value = max(value, *map(difference, mine.values, theirs["values"]))
        for fresh, numbers in theirs["grads"].items():
            grad = max(grad or 0.0, difference(mine.grads[fresh], numbers))
    return value, grad, ""


def stale(answered: dict[str, Any]) -> list[str]:
    """What to say where a system now answers other numbers than recorded. Another processor may round differently."""
    recorded = load()
    found = [name for name, now in answered.items() if "error" not in now and not recorded_as(now, recorded.get(name))]
    return [f"{len(found)} recorded answers are not those of the systems: make oracles RECORD=--record\n  {found[0]}"
            ] if found else []


def recorded_as(now: dict[str, Any], then: Numbers | None) -> bool:
    if then is None or set(then.grads) != set(now["grads"]) or len(then.values) != len(now["values"]):
        return False
    pairs = [*zip(then.values, now["values"], strict=True), *((then.grads[n], now["grads"][n]) for n in then.grads)]
    return all(difference(a, b) <= 1e-12 for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracles")
    parser.add_argument("directory", nargs="?", default=".oracles", type=Path)
    parser.add_argument("--record", action="store_true", help="write the systems' answers to recorded.json")
    parser.add_argument("--only", default="", metavar="WORD", help="systems and calls that contain WORD")
    args = parser.parse_args()
    rows = [row for row in ROWS if args.only in row.name]
    failed, answered = [], {}
    print(f"{'system':<10}{'version':<9}{'value':>9}{'gradient':>10}  call")
    for system in SYSTEMS:
        of_system = [row for row in rows if row.system == system]
        if not of_system:
            continue
        versions, results = answers(system, of_system, args.directory)
        answered |= results
        version = versions[SYSTEMS[system].package]
        if version != SYSTEMS[system].version:
            failed.append(f"{system}: version {version} is installed, {SYSTEMS[system].version} is pinned")
        for row in of_system:
            value, grad, problem = compare(row, results)
            alike = max(value, grad or 0.0) <= row.tolerance
            wrong = problem or ("" if alike == row.same else f"the numbers {'differ' if row.same else 'are the same'}")
            shown = "" if row.same else " (differs, as the page says)"
            print(f"{SYSTEMS[system].page:<10}{version:<9}{value:>9.1e}{'' if grad is None else f'{grad:.1e}':>10}"
                  f"  {row.call}{shown}{'  WRONG' * bool(wrong)}")
            if wrong:
                failed.append(f"{row.name}: {wrong}")
    if args.record:
        save(answered, whole=not args.only)
        options.record(args.directory)
    else:
        failed += stale(answered)
    failed += options.unknown(args.directory)
    named = sum(len(options.asked(page)) for page in options.SOURCES)
    print("\n".join(["", *failed]) if failed else f"\n{len(rows)} rows agree with the systems, which have all {named} "
          "options that docs/coming-from names")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
