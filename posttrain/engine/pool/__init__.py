"""Several engines, each in a process of its own, as one `core.ports.Sampler`, and environments in processes of their
own. `supervised_processes` replaces those that die. docs/guides/placement.md describes them.

Read `parent_side` and `worker_side` (a call and its answer), `engine_process` or `ray_actor` (what carries them), then
`engine_pool`; of environments `remote_environment`, then `environment_pool`.
"""
