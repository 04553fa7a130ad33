"""The run folder: what is written, how it is read again, and what a folder from elsewhere may do.

Read `step_format` (a line of the record), `run_folder` (the writer), `run_reader` (the reader) and `checkpoint`. A
folder may be hostile: `external_access` lists what its settings would use outside of it.
"""
