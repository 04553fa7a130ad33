"""Other people's tasks behind our port."""
