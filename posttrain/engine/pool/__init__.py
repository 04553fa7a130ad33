"""Several engines, each in a process of its own, as one `core.ports.Sampler`. docs/placement.md describes them."""
