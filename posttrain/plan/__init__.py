"""Facts of a run that are known before it starts, without torch.

They are the shape of a model, the memory and the time of a step, how many samples may be asked ahead, and a simulation
of the loop of engines and learner. Begin with `work`, which turns a stage into sizes.
"""
