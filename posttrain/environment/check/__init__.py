"""`posttrain check ENV`: does an environment pay right answers, and only those? Every probe tries it, none takes its
word.

A policy finds whatever a verifier pays for. These probes look first: right answers and other spellings of them, near
misses, constants, noise, templates, lists of every answer, the same answer twice and beside a hundred others.
"""

from posttrain.environment.check.probe import Mark, Probe, ProbeResult
from posttrain.environment.check.report import PROBES, RATE, TASKS, CheckReport, check
from posttrain.environment.check.subject import Subject

__all__ = ["PROBES", "RATE", "TASKS", "CheckReport", "Mark", "Probe", "ProbeResult", "Subject", "check"]
