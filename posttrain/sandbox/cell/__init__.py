"""The code that runs inside a sandbox: standard library only, imported there under the name `cell`, and without any
secret."""
