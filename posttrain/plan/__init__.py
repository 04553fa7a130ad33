"""What a run will cost and where it will end, before it is started: pure functions of numbers, without torch."""
