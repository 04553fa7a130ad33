"""What every run checks, by subject. Checks observe a stage's events (`role.events`): the step knows none of them.

A violated check stops the run and says what to do; one that is statistical states its chance of a false alarm. What
costs next to nothing is checked at every step; second opinions are asked for ever more rarely (`schedule.due`).
"""
