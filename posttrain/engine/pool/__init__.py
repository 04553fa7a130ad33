"""Several engines, each in a process of its own, as one `core.ports.Sampler`, and environments in processes of their
own. `supervised_processes` replaces those that die. docs/guides/placement.md describes them."""
