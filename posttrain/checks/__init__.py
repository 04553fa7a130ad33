"""The checks of every run. They observe the events of a stage (`role.events`); no step calls them.

`sampling`, `learning` and `judging` are by subject; checks that only one kind of stage has lie in its folder below
`posttrain.stages`, where `checks_by_kind` lists all. A broken invariant stops the run.
"""
