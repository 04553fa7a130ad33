"""What can be said of a run before it starts, without torch: how much may be asked ahead."""
