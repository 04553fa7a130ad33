"""A loop of engines, verifiers and a learner that is played event by event. `simulated_loop`: its sizes and times, and
what comes of it; `simulator`: how it is played. `plan.staleness` has the closed forms of what can be solved."""
