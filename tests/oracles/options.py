"""The option names in docs/coming-from/*.md, and which of them the systems' own sources have.

In: the left columns of a page's tables. Out: the names that stand in the system's configuration sources, as words. Those
of the last `make oracles RECORD=--record` are in `options.json`, which `test_options.py` holds the pages to.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.oracles.rows import HERE, SYSTEMS

FILE = HERE / "options.json"
PAGES = HERE.parents[1] / "docs/coming-from"
SOURCES = {  # page -> system, and below its site-packages the files that define options
    "trl": ("TRL", ("trl/trainer/*.py", "trl/experimental/*/*_config.py", "transformers/training_args.py")),
    "verl": ("verl", ("verl/trainer/config/**/*.yaml", "verl/trainer/config/*.py", "verl/workers/config/*.py",
                      "verl/trainer/ppo/core_algos.py")),
    "openrlhf": ("OpenRLHF", ("openrlhf/cli/*.py",)),
    "real": ("ReaL", ("realhf/api/**/*.py", "realhf/base/*.py", "realhf/experiments/**/*.py", "realhf/impl/**/*.py",
                      "realhf/system/*.py")),
}


def asked(page: str) -> list[str]:
    """What stands in backquotes in the left columns: names and values without their quotes, flags as they are."""
    rows = re.findall(r"^\| ([^|]+) \| ", (PAGES / f"{page}.md").read_text(), re.M)
    words = (word for cell in rows for quoted in re.findall(r"`([^`]+)`", cell) for word in quoted.split())
    return sorted({word.strip('"') for word in words})


def found(page: str, environments: Path) -> list[str]:
    """Those that the installed system has. A dotted name has all of its parts; the flags of a model's optimizer are
    written once for actor and critic."""
    system, patterns = SOURCES[page]
    python = environments / SYSTEMS[system].environment / "bin/python"
    where = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True,
                           stdout=subprocess.PIPE, check=True).stdout.strip()
    text = "\n".join(path.read_text() for pattern in patterns for path in sorted(Path(where).glob(pattern)))
    text = text.replace("{prefix}", "actor") + text.replace("{prefix}", "critic")
    return [name for name in asked(page) if all(re.search(rf"(?<![\w.-]){re.escape(part)}(?![\w-])", text) for part in (
        [name] if name.startswith("-") else name.split(".")))]


def script(text: str) -> list[str]:
    """The arguments of ReaL's script on its page: `name=value`."""
    (command,) = re.findall(r"```bash\npython3 -m realhf.apps.quickstart ppo (.*?)```", text, re.S)
    return [word for word in command.replace("\\\n", " ").split() if "=" in word]


def refused(arguments: list[str], environments: Path) -> str:
    """What ReaL's configuration says of arguments that it does not take; "" if it takes all with these values."""
    python = environments / SYSTEMS["ReaL"].environment / "bin/python"
    done = subprocess.run([python, HERE / "real_script.py", *arguments], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, check=False)
    if done.returncode:
        return done.stderr.strip()
    held = json.loads(done.stdout.splitlines()[-1])
    wrong = [a for a in arguments if str(held[a.partition("=")[0]]) != a.partition("=")[2]]
    return f"other values: {', '.join(wrong)}" if wrong else ""


def record(environments: Path) -> None:
    FILE.write_text(json.dumps({page: found(page, environments) for page in SOURCES}, indent=1) + "\n")


def unknown(environments: Path) -> list[str]:
    """What to say about names that a system does not have, or that were not recorded."""
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    lines = []
    for page, (system, _) in SOURCES.items():
        now = found(page, environments)
        lines += [f"docs/coming-from/{page}.md: {system} has no {name}" for name in asked(page) if name not in now]
        if now != known.get(page):
            lines.append(f"the options of docs/coming-from/{page}.md are not those recorded: make oracles RECORD=--record")
    if fault := refused(script((PAGES / "real.md").read_text()), environments):
        lines.append(f"docs/coming-from/real.md: ReaL does not take the script: {fault}")
    return lines
