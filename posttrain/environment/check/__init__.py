"""`posttrain check ENV`: does an environment reward right answers, and only those? A policy finds whatever a verifier
rewards. These probes look first, with right answers, near misses, constants, noise, templates and lists of answers."""

from posttrain.environment.check.probe import Mark, Probe, ProbeResult
from posttrain.environment.check.report import PROBES, RATE, TASKS, CheckReport, check
from posttrain.environment.check.subject import Subject

__all__ = ["PROBES", "RATE", "TASKS", "CheckReport", "Mark", "Probe", "ProbeResult", "Subject", "check"]
