"""The checks of every run. They observe the events of a stage (`role.events`); no step calls them.

Each of the folders `sampling`, `learning` and `judging` holds the checks of one subject. A check that only one kind of
stage has lies in the folder of that kind, below `posttrain.stages`. `stages.checks_by_kind` lists the checks of each
kind. A broken invariant stops the run.
"""
