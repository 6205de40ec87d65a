"""The plan: the waist of the system. The compiler writes it; the runtime, the verifier and every view read only it.

Nothing here imports the compiler or torch. `model` declares the file, `expr` the arithmetic inside it.
"""
