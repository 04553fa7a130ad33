"""Runs all probes of one environment and collects their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from posttrain.core.abilities import LintFinding
from posttrain.environment.check.baselines import BASELINES, PREFERENCES
from posttrain.environment.check.probe import Mark, Probe, ProbeResult
from posttrain.environment.check.reward_probes import PAYMENT
from posttrain.environment.check.subject import Subject
from posttrain.environment.check.workings import WORKINGS
from posttrain.environment.conformance import Check, claims
from posttrain.environment.single import SingleTurn

TASKS, RATE = 32, 16.0
"""Defaults: the number of tasks, and how many answers have to be judged in a second."""
PROBES: tuple[Probe, ...] = (*PAYMENT, *BASELINES, *PREFERENCES, *WORKINGS)


@dataclass(frozen=True)
class CheckReport:
    """The results of all probes, in order."""

    env: str
    tasks: int
    sources: tuple[str, ...]
    findings: tuple[ProbeResult, ...]

    def __repr__(self) -> str:
        return f"CheckReport({self.env}, {self.tasks} tasks: {self.verdict})"

    @property
    def passed(self) -> bool:
        return not any(f.mark is Mark.FAIL for f in self.findings)

    @property
    def verdict(self) -> str:
        """A sentence that names the probes that failed, or says that none failed of those that could be tried."""
        failed, skipped, all_ = self.marked(Mark.FAIL), self.marked(Mark.SKIP), len(self.findings)
        if failed:
            return f"{len(failed)} of {all_} probes failed: {', '.join(failed)}"
        tried = f" in the {all_ - len(skipped)} probes that could be tried; {len(skipped)} could not" if skipped else ""
        return f"nothing failed{tried}"

    def marked(self, mark: Mark) -> tuple[str, ...]:
        """Names of the probes with this mark."""
        return tuple(f.probe for f in self.findings if f.mark is mark)

    def plain(self) -> Mapping[str, Any]:
        """As a dict for JSON."""
        fields = asdict(self)
        return {**fields, "passed": self.passed, "sources": [*self.sources], "findings": [*fields["findings"]]}


async def check(
    env: SingleTurn,
    *,
    tasks: int = TASKS,
    rate: float = RATE,
    progress: Callable[[str], None] = lambda _: None,
    found: Sequence[LintFinding] = (),
    earned: Sequence[float] = (),
) -> CheckReport:
    """Try an environment and its verifiers.

    Args:
        tasks: the number of tasks: held-out ones, then training tasks if there are too few of those.
        rate: how many answers have to be judged in a second.
        progress: called with the name of each probe as it begins, and with the number of answers judged in it.
        found: findings about the data that are known already.
        earned: what real answers earned in a run.
    """
    progress("claims")
    results = [_claim(c) for c in await claims(env)]
    lint = env.abilities.lint
    results += [_linted(f, "judged data may teach something else") for f in (lint() if lint is not None else ())]
    results += [_linted(f, "the policy may be shown, or learn, something else than the data says") for f in found]
    # Without a source of verdicts there is nothing to probe; what is known of the data is still worth telling.
    if not env.abilities.judges:
        return CheckReport(env.name, len(env.heldout) + (env.train.count or 0), (), tuple(results))
    progress("gold")
    count, chosen = env.train.count, list(env.heldout[:tasks])
    missing = tasks - len(chosen)
    chosen += [env.train.task(i) for i in range(missing if count is None else min(missing, count))]
    subject = await Subject.of(env, chosen, rate, lambda counted: progress(f"gold: {counted}"), earned)
    for probe in PROBES:
        progress(probe.name)
        subject.counted = lambda counted, name=probe.name: progress(f"{name}: {counted}")
        results.append(await probe(subject))
    environment_source = (env.name,) if env.vouches_for_gold else ()
    sources = dict.fromkeys([*environment_source, *subject.sources, *subject.shaping])
    return CheckReport(env.name, len(chosen), tuple(sources), tuple(results))


def _linted(f: LintFinding, means: str) -> ProbeResult:
    """Returns a finding about the data as a probe's result."""
    return ProbeResult(f.name, Mark.WARN if f.warns else Mark.OK, f.seen, means, f.advice if f.warns else "")


def _claim(c: Check) -> ProbeResult:
    """A claim of the environment as a probe's result."""
    mark, advice = (Mark.OK, "") if c.passed else (Mark.FAIL, c.advice)
    return ProbeResult(c.name, mark, c.detail, "what the environment says of itself holds", advice)
