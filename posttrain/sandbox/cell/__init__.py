"""The code that runs inside a sandbox under the name `cell`: standard library only, and without any secret."""
