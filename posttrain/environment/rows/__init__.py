"""Rows of the user's data, read strictly: an error names the file and the line.

Begin with `row_reader`; `own_prompts` makes an environment of them.
"""
