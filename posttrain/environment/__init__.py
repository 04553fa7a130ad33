"""Tasks, turns and tools. No torch.

Read `single` (the base class), then `make` (by name) and `gallery`. `rows` reads the user's data, `templates` renders
chats, `tools` has the tool loop, `judged` pairs and judges, `check` the probes of `posttrain check`.
"""
