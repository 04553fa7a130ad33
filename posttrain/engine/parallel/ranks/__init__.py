"""The processes of a run over ranks: how they start, meet, get their orders and are found dead."""
