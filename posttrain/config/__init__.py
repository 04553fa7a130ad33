"""The settings of a run as one frozen tree, and how words of the command line change it. No torch.

Read `run`, then `stages.stage`. `overrides` and `values` read `rl.prompts=64`; `field_docs` finds the text that
explains a setting, which stands below the field in its class. A new setting is a field here and nowhere else.
"""
