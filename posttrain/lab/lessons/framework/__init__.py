"""Pages 01 to 08: the six roles around the loss, and turns with tools."""
