"""From rewards to credit: shaping, baselines, scale, whitening, values. numpy, float64.

Begin with `step_credit`, which calls the others in order.
"""
