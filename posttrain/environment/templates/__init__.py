"""Messages to tokens: chat templates, rendered turn by turn in a process of their own, and what may be wrong with one.

Begin with `renderer`.
"""
