"""`posttrain check ENV`: does an environment reward right answers, and only those? The probes test it with answers.

A policy finds whatever a verifier rewards. These probes look first: they try right answers and other spellings of them,
near misses, constants, noise, templates and lists of every answer, and judge the same answer twice and in a crowd.
"""

from posttrain.environment.check.probe import Mark, Probe, ProbeResult
from posttrain.environment.check.report import PROBES, RATE, TASKS, CheckReport, check
from posttrain.environment.check.subject import Subject

__all__ = ["PROBES", "RATE", "TASKS", "CheckReport", "Mark", "Probe", "ProbeResult", "Subject", "check"]
