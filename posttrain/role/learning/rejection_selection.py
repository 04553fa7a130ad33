"""Selects which of its own samples a rejection sampling stage keeps, and makes the minibatches that imitate them.

    episodes -> candidates   judged and whole completions, regenerated ones too, each after the prompt without a hint
    candidates -> kept       by the method's rule; equal completions once; at most a number for each prompt
    kept -> minibatches      shuffled passes, each a function of (seed, stage, round, pass)

An episode that could not be judged is no candidate. It is not a wrong answer either: it only counts as unjudged. A
completion that was cut off is no candidate, whatever its reward, because imitating it would teach never to stop.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from posttrain.config.stages.keep_rule import Keep
from posttrain.config.stages.rejection import RejectionMethod
from posttrain.core import seeds
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.transcript import shown_segment
from posttrain.core.types import Episode, Group, Segment, Task
from posttrain.role.judges.regenerate import RegeneratedAnswer
from posttrain.role.learning.demonstrations import LIKELIHOOD
from posttrain.system import read_untrusted
from posttrain.system.errors import InvariantError, RunFolderError

FILE = "candidates.safetensors"
"""Name of the file with the candidates of a round, in a folder that stays for the whole run (`RunFolder.keep`)."""
HINTED = "/hinted"
"""Suffix of the id of a task that is asked with its answer as a hint."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A completion that may be kept, as it would be imitated."""

    prompt: str
    """Id of the task without a hint."""
    visit: int
    sibling: int
    reward: float
    segments: tuple[Segment, ...]
    """Its tokens, under the prompt that a rollout of the task gets; several where history was rewritten."""
    hinted: bool = False
    """Whether the policy was given the answer as a hint."""
    begun: tuple[int, int] | None = None
    """Of a regenerated completion: the sibling number of the wrong answer, and how many of its steps were kept. Its own
    `sibling` is then its number among these completions."""

    @property
    def plain(self) -> bool:
        """True where the policy said the whole completion at once, without a hint."""
        return not self.hinted and self.begun is None

    @cached_property
    def key(self) -> bytes:
        """Equal for two completions of one prompt that say the same tokens."""
        return np.concatenate([s.ids[s.mask] for s in self.segments]).tobytes()


@dataclass(frozen=True, eq=False)
class RoundSamples:
    """The result of a round's rollouts: the candidates, and counts of all completions."""

    candidates: tuple[Candidate, ...]
    prompts: int
    """Prompts asked."""
    judged: int
    """Completions without a hint that have a reward."""
    unjudged: int = 0
    cut: int = 0
    """Number of the judged completions that a limit on tokens or time cut off."""
    hints: int = 0
    """Prompts asked again with a hint."""


def imitation(segment: Segment, prompt: np.ndarray | None = None) -> Segment:
    """A sampled segment as a segment to imitate, scored under the model's own distribution (`LIKELIHOOD`), behind
    `prompt` where one is given."""
    first = int(np.argmax(segment.mask))
    # The completion is learned after the prompt that the policy will be asked with, whatever
    # prompt it was sampled with. The sampler's log-probs are dropped: they belong to that prompt.
    head = segment.ids[:first] if prompt is None else prompt
    ids = np.concatenate([head, segment.ids[first:]])
    mask = np.concatenate([np.zeros(len(head), bool), segment.mask[first:]])
    return shown_segment(ids, mask, LIKELIHOOD)


def prompt_ids(group: Group) -> np.ndarray | None:
    """The tokens that the policy was shown before it first spoke about a task; None where no episode got so far."""
    for e in group.episodes:
        # All episodes have the prompt of the task, so the first one that has tokens is read.
        if e.segments and e.segments[0].mask.any():
            return e.segments[0].ids[: int(np.argmax(e.segments[0].mask))]
    return None


def whole(e: Episode) -> bool:
    """Returns whether the policy said something in an episode that no limit cut off, and no turn of it was aborted."""
    return not e.stop.cut and not e.cut and e.spoken > 0 and not e.shown


def candidates_of(
    plain: Sequence[Group], hinted: Sequence[Group] = (), regenerated: Sequence[RegeneratedAnswer] = ()
) -> RoundSamples:
    """The candidates of a round: of its rollouts, of wrong answers that were regenerated, and of rollouts with hints,
    each in prompt order."""
    prompts = {g.task.id: prompt_ids(g) for g in plain}
    candidates: list[Candidate] = []
    cut = 0
    for e in (e for g in plain for e in g.judged):
        cut += not whole(e)
        candidates += [_candidate(e, e.task.id)] if whole(e) else []
    candidates += regenerated_candidates(regenerated)
    for e in (e for g in hinted for e in g.judged if whole(e)):
        task_id = e.task.id.removesuffix(HINTED)
        candidates.append(replace(_candidate(e, task_id, without_hint(prompts, task_id)), hinted=True))
    unjudged = sum(len(g.episodes) - len(g.judged) for g in plain)
    return RoundSamples(tuple(candidates), len(plain), sum(len(g.judged) for g in plain), unjudged, cut, len(hinted))


def _candidate(e: Episode, task_id: str, prompt: np.ndarray | None = None) -> Candidate:
    """A judged episode as a candidate of the task `task_id`, under another prompt where one is given."""
    assert e.reward is not None  # judged
    return Candidate(task_id, e.visit, e.sibling, e.reward, tuple(imitation(s, prompt) for s in e.segments))


def regenerated_candidates(regenerated: Sequence[RegeneratedAnswer]) -> list[Candidate]:
    """Candidates among the completions that replace a first wrong step, each once, also where siblings share it."""
    by_completion: dict[Episode, Candidate] = {}
    for a in regenerated:
        for c in a.completions:
            # `begun` names the first answer in order; later answers with the same completions add nothing.
            if c.reward is not None and whole(c) and c not in by_completion:
                by_completion[c] = replace(_candidate(c, c.task.id), begun=(a.episode.sibling, a.kept))
    return list(by_completion.values())


def without_hint(prompts: Mapping[str, np.ndarray | None], task_id: str) -> np.ndarray | None:
    """The prompt under which a completion to a hinted prompt is imitated: the one that the same task got before."""
    return prompts[task_id]


def to_ask_again(plain: Sequence[Group], keep: Keep) -> list[Group]:
    """The groups that are asked again, with a hint or from their steps: at least one completion was judged, and the
    rule keeps none of the judged ones.

    A group is left out where nothing could be judged, because nothing is known of it. It is left out too where history
    was rewritten, because a completion then has several prompts.
    """
    out: list[Group] = []
    for group in plain:
        # The rule of `select` decides here too, so a prompt with a kept completion is not asked again.
        rewards = [e.reward for e in group.judged if e.reward is not None and whole(e)]
        single = all(len(e.segments) == 1 for e in group.episodes)
        if group.judged and single and prompt_ids(group) is not None and not keep.chosen(rewards):
            out.append(group)
    return out


def hinted_task(task: Task, prompt: str | tuple[object, ...]) -> Task:
    """The same task, asked with a hint."""
    return replace(task, id=f"{task.id}{HINTED}", prompt=prompt)


@dataclass(frozen=True, eq=False)
class Selection:
    """The candidates that a round imitates, and counts of those that were left out."""

    kept: tuple[Candidate, ...]
    passing: int
    """Candidates that the rule chose."""
    duplicates: int
    """Number of chosen candidates that were left out because an equal one is kept."""
    over: int
    """Number of chosen candidates that are over the limit of a prompt."""
    distinct: Mapping[str, int] = field(default_factory=dict[str, int])
    """By prompt: how many different completions the rule chose among the plain samples, before the limit."""

    def gauges(self, asked: RoundSamples, round: int) -> Gauges:
        plain = [c for c in self.kept if c.plain]
        return {
            "reject/round": Gauge(round, 1),
            "reject/kept": Gauge(len(plain), asked.judged),
            "reject/covered": Gauge(len({c.prompt for c in plain}), asked.prompts),
            "reject/duplicates": Gauge(self.duplicates, self.passing),
            "reject/distinct": Gauge(sum(self.distinct.values()), len(self.distinct)),
            "reject/hinted": Gauge(sum(c.hinted for c in self.kept), len(self.kept)),
            "reject/regenerated": Gauge(sum(c.begun is not None for c in self.kept), len(self.kept)),
            "reject/cut": Gauge(asked.cut, asked.judged),
            "reject/reward": Gauge.of([c.reward for c in self.kept]),
        }


def select(candidates: Sequence[Candidate], method: RejectionMethod, improvement: int = 0) -> Selection:
    """Returns the candidates that the method keeps. Of equal ones, and of more than the limit, the first sampled ones
    stay: the choice depends only on what was sampled and how it was judged."""
    prompts: dict[str, list[Candidate]] = {}
    for c in candidates:
        prompts.setdefault(c.prompt, []).append(c)
    kept: list[Candidate] = []
    passing = duplicates = over = 0
    distinct: dict[str, int] = {}
    # By prompt: the rule, then equal ones once, then the limit, which so counts different completions.
    for task_id, of_prompt in prompts.items():
        chosen = [of_prompt[i] for i in method.keep.chosen([c.reward for c in of_prompt], improvement)]
        different = once(chosen) if method.distinct else chosen
        # The number of different answers that plain sampling found. With hinted and regenerated
        # ones it would stay high although sampling itself finds fewer.
        if plain_keys := {c.key for c in chosen if c.plain}:
            distinct[task_id] = len(plain_keys)
        limited = different if method.most is None else different[: method.most]
        passing, duplicates = passing + len(chosen), duplicates + len(chosen) - len(different)
        over += len(different) - len(limited)
        kept += limited
    return Selection(tuple(kept), passing, duplicates, over, distinct)


def once(chosen: Sequence[Candidate]) -> list[Candidate]:
    """The first of each set of equal completions of a prompt."""
    first: dict[bytes, Candidate] = {}
    for c in chosen:
        first.setdefault(c.key, c)
    return list(first.values())


def steps_of(kept: int, per_step: int, epochs: int) -> int:
    """Optimizer steps of a round with `kept` kept completions, at most `per_step` of them a step."""
    # A pass has the number of steps into which `drawn` cuts it.
    return epochs * math.ceil(kept / per_step)


def drawn(kept: Sequence[Candidate], per_step: int, position: int, key: tuple[int, str, int]) -> list[Candidate]:
    """The kept completions of one step. A pass shuffles all kept completions and cuts them into steps of nearly equal
    size, so no completion is twice in a step.

    Args:
        position: steps of the round before this one.
        key: (seed, stage, round).
    """
    seed, stage, round = key
    # position // parts is the pass, position % parts the step within it. Parts of `array_split`
    # differ in size by one at most; slices of `per_step` completions could leave a small last part.
    parts = math.ceil(len(kept) / per_step)
    order = seeds.generator(seed, f"kept/{stage}", round, position // parts).permutation(len(kept))
    return [kept[i] for i in np.array_split(order, parts)[position % parts]]


# --- on disk ---------------------------------------------------------------------------------------------------------


def write(folder: Path, asked: RoundSamples) -> None:
    """Writes the candidates of a round, for a stage that is resumed inside it."""
    candidates = asked.candidates
    segments = [s for c in candidates for s in c.segments]
    # A safetensors file holds numbers only, so texts are stored as bytes of JSON.
    task_ids = json.dumps([c.prompt for c in candidates]).encode()
    save_file(
        {
            "counts": np.array([asked.prompts, asked.judged, asked.unjudged, asked.cut, asked.hints], np.int64),
            "prompts": np.frombuffer(task_ids, np.uint8).copy(),
            "places": np.array([_place(c) for c in candidates], np.int64).reshape(-1, 6),
            "rewards": np.array([c.reward for c in candidates], np.float64),
            "lengths": np.array([len(s.ids) for s in segments], np.int64),
            "ids": np.concatenate([np.zeros(0, np.int32), *(s.ids for s in segments)]),
            "mask": np.concatenate([np.zeros(0, bool), *(s.mask for s in segments)]),
        },
        folder / FILE,
    )


def _place(c: Candidate) -> tuple[int, ...]:
    """The numbers that tell a candidate from others of its prompt, and how many segments it has. (0, 0): no `begun`."""
    return (c.visit, c.sibling, int(c.hinted), *(c.begun or (0, 0)), len(c.segments))


def read(folder: Path) -> RoundSamples:
    """Reads the data that `write` wrote, bit for bit; RunFolderError where the file is damaged."""
    path = folder / FILE
    with read_untrusted.opened(path, RunFolderError):
        pass
    try:
        arrays = load_file(path)
        ends = np.cumsum(arrays["lengths"])
        parts = [slice(b - n, b) for b, n in zip(ends.tolist(), arrays["lengths"].tolist(), strict=True)]
        segments = [shown_segment(arrays["ids"][part], arrays["mask"][part], LIKELIHOOD) for part in parts]
        task_ids = read_untrusted.parse(arrays["prompts"].tobytes(), str(path), RunFolderError)
        candidates: list[Candidate] = []
        first = 0
        for task_id, place, reward in zip(task_ids, arrays["places"].tolist(), arrays["rewards"].tolist(), strict=True):
            visit, sibling, hinted, wrong_sibling, kept, count = place
            # A regenerated completion keeps at least one step, so 0 steps mean `begun=None` (`_place`).
            begun = (wrong_sibling, kept) if kept else None
            its_segments = tuple(segments[first : first + count])
            candidates.append(Candidate(task_id, visit, sibling, reward, its_segments, bool(hinted), begun))
            first += count
        return RoundSamples(tuple(candidates), *(int(x) for x in arrays["counts"]))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, InvariantError) as error:
        raise RunFolderError(f"{path} is damaged ({error}). Go on from a checkpoint of another round") from error
