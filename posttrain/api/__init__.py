"""The Python surface: `main` has run, evaluate and export; `session` is one run from its start to its end.

The other files are behind `posttrain plan` (`planned`, `swept`, `plan_against`, `faster_run`, `machine_speed`) and
`posttrain eval RM --answers POLICY` (`reward_transfer`).
"""
