"""The settings of each kind of stage, one file a kind; `stage` has what all kinds share.

A new kind of stage is one file here and one folder in `posttrain.stages`.
"""
