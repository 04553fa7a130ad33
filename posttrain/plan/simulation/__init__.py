"""A simulation of a loop of engines, verifiers and a learner, event by event.

`simulated_loop` has the loop's sizes and times and the outcome; `simulator` plays it.
"""
