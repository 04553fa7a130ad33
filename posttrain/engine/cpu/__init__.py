"""C code for the CPU: compiled once per machine by its own compiler, and called through ctypes.

docs/design/compiled-code.md says what it gains, how it is switched off, and what happens without a compiler.
"""
