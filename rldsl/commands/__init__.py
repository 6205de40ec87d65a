"""What the commands of `rlc` do, without the command line: typed arguments in, values out. `cli/` alone knows click,
and prints."""


class Usage(Exception):
    """The command was not given what it needs: exit status 2, where a mistake in a program is a Failure and 1."""
