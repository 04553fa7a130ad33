"""The input of a command, and the `Run` it asks for, with all that can be refused before torch is imported.

Begin with `run_request`. Defaults for a real model, settings that follow from the rows, branches, resumed runs and the
question whether a foreign file is trusted are files of their own.
"""
