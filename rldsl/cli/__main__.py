"""`python -m rldsl.cli` is `rlc`."""

from rldsl.cli import main

main(prog_name="rlc")
