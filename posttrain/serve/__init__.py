"""Floor 3: an OpenAI-compatible HTTP server over a `core.ports.Sampler`."""
