"""Groups of the queue and of the replay buffer in a checkpoint: rows of its state, and files with their episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from posttrain.core.gauge import Gauge
from posttrain.core.types import Group, Task
from posttrain.record import step_format
from posttrain.system import files
from posttrain.system.errors import RunFolderError

QUEUE, REPLAY = "queue.npz", "replay.npz"
"""Files of a checkpoint with the episodes of ended groups, of the queue and of the replay buffer. They have the format
of a step's episodes."""


@dataclass(frozen=True, kw_only=True)
class QueuedGroup:
    """A group of the queue as plain data."""

    index: int
    """Index of its task in the source."""
    visit: int
    """How often its task came before."""
    cursor: int
    """Prompts that were taken up to it."""
    begun: int
    """The sampler's version when the group was asked."""
    siblings: int = 0
    """How many of its episodes are in the file. 0: the group had not ended, and is asked again."""
    greedy: bool = False
    """Whether the group's greedy answer follows these episodes in the file."""
    aborted: int = 0
    aborted_tokens: int = 0
    logged: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    """(sum, count) of each gauge of `Group.logged`."""
    tokens: int = 0
    turns: int = 0
    """Tokens and turns that the engine said for it."""

    def ended(self, group: Group, spoken: Gauge) -> QueuedGroup:
        """This row when its group has ended. `spoken`: the tokens of its turns (sum), and how many turns (count)."""
        return replace(
            self,
            siblings=len(group.episodes),
            greedy=group.greedy is not None,
            aborted=group.aborted,
            aborted_tokens=group.aborted_tokens,
            logged={name: (g.sum, g.count) for name, g in group.logged.items()},
            tokens=int(spoken.sum),
            turns=int(spoken.count),
        )


def save_groups(path: Path, groups: Sequence[Group]) -> None:
    """Write the episodes of groups that have ended, in order."""
    episodes = [e for g in groups for e in (*g.episodes, *filter(None, [g.greedy]))]
    columns = step_format.to_columns([step_format.Recorded(e) for e in episodes])
    files.write_file(path, step_format.pack_columns(columns), durable=True)


def load_groups(path: Path, queued: Sequence[QueuedGroup], task: Callable[[int], Task] | None = None) -> list[Group]:
    """The groups of `queued` that had ended.

    Args:
        task: gives a task of the source by its index. None: tasks as they were written, for groups that nothing judges
            again.

    Raises:
        RunFolderError: the file and the rows do not belong together, or the tasks are others.
    """
    # Groups that had not ended have no episodes in the file. They are asked again.
    ended = [q for q in queued if q.siblings]
    if not ended:
        return []
    recorded = [r.episode for r in step_format.from_columns(step_format.read_columns(path))]
    # With another number of episodes, groups would get episodes of other groups.
    if len(recorded) != sum(q.siblings + q.greedy for q in ended):
        raise RunFolderError(f"{path} is damaged: it holds {len(recorded)} episodes, and the state names others")
    out, at = list[Group](), 0
    for q in ended:
        # The environment's present task has all that judges need. Its id must be the recorded one.
        present = recorded[at].task if task is None else task(q.index)
        episodes = [
            replace(e, task=present) for e in recorded[at : at + q.siblings + q.greedy] if e.task.id == present.id
        ]
        if len(episodes) != q.siblings + q.greedy:
            raise RunFolderError(
                f"{path} holds answers to other tasks than the environment has now ({present.id!r}): were its data"
                " changed? Go on with the data that the run was begun with"
            )
        at += len(episodes)
        # The greedy answer was written behind its siblings.
        greedy = episodes.pop() if q.greedy else None
        logged = {name: Gauge(*sums) for name, sums in q.logged.items()}
        out.append(Group(present, q.visit, tuple(episodes), greedy, q.aborted, q.aborted_tokens, logged))
    return out
