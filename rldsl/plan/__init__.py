"""The plan, the intermediate representation: the compiler writes it; the runtime, the verifier and every view read only
it.

Nothing here imports the compiler or torch. `model` declares the tables of the file and `events` its body, `expr` the
arithmetic inside it.
"""
