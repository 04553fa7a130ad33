"""One module per command: its arguments (`add`) and what it does. Each imports what it needs when it is called."""
