"""The checks of every run, by subject. Checks observe the events of a stage (`role.events`); no step calls them.

A check that fails stops the run with a message that says what to do. A statistical check states its chance of a false
alarm. Cheap checks run at every step. Those that compute something a second time run ever more rarely (`schedule.due`).
"""
