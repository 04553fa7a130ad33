"""The pieces of algorithms, one type each. A piece owns its numbers and refuses meaningless ones.

`piece` has the interface. Its mathematics is a function of the same subject in `posttrain.algorithm`.
"""
