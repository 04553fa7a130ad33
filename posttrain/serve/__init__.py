"""An OpenAI-compatible HTTP server over a `core.ports.Sampler`."""
