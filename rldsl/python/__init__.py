"""The Python API, as `import rldsl` offers it: entries, the plan with what it can show, and messages.

Values here wrap those of the compiler and know how to show themselves; nothing of the compiler imports them. The
command line uses the same functions.
"""
