"""Several engines, each in a process of its own, as one `core.ports.Sampler`. docs/guides/placement.md describes
them."""
