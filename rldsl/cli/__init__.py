"""`rlc`: the command line.

Every command imports what it needs when it runs, so that `rlc --help` and `rlc check` stay quick.
"""

from rldsl.cli import place, plan, program, run
from rldsl.cli.shell import main

__all__ = ["main", "place", "plan", "program", "run"]
