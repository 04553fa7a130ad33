"""C code for the CPU: compiled once per machine by its own compiler, and called through ctypes.

`compile_native` says when it is used, how it is switched off, and what happens without a compiler.
"""
