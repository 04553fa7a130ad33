"""A small shop and a calendar with four tools: for `<2 tea,vet tue>` the policy looks both up, buys, books, and writes
`done`.

    [find(item="tea"),free(day="tue")]                      is shown [17][9 14]
    [buy(id=17,n=2),book(day="tue",at=9,what="vet")]        is shown [ok][ok]
    done

The numbers of the items and the free hours differ from task to task, and only the tools return them. The reward is 1 if
the cart and the calendar are at the end exactly as asked, whatever the policy wrote before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from posttrain.core.ports import Attempt
from posttrain.core.types import Task
from posttrain.core.verdict import Verdict
from posttrain.environment.generated import GeneratedTasks
from posttrain.environment.single import require
from posttrain.environment.tools.tool import Observation, Toolbox, ToolError, tool
from posttrain.environment.tools.tool_world import ToolWorld
from posttrain.system.errors import nearest
from posttrain.verifier.reward_source import graded

ITEMS = ("tea", "rye", "oil", "jam", "nut", "fig", "egg", "ham")
ERRANDS = ("vet", "gym", "tax", "bus", "cut", "fix")
DAYS = ("mon", "tue", "wed", "thu", "fri")
# The most pieces of an item, and the hours of a day.
MOST, HOURS = 9, tuple(range(8, 18))
KINDS = ("buy", "book", "both")
# (number of pieces, item, errand, day); '' for a part that the task does not have
Key = tuple[str | int, ...]


class ShopAndCalendar(Toolbox):
    """The tools of one episode. `catalogue` maps an item to its number, and `free_hours` a day to its hours."""

    def __init__(self, catalogue: dict[str, int], free_hours: dict[str, list[int]]) -> None:
        self._catalogue, self._free = catalogue, {day: list(hours) for day, hours in free_hours.items()}
        self._cart: dict[str, int] = {}
        self._calendar: dict[str, str] = {}

    @tool
    def find(self, item: Annotated[str, "name of an item"]) -> str:
        """Looks up the number under which the shop sells an item."""
        if item not in self._catalogue:
            raise ToolError("no such item")
        return str(self._catalogue[item])

    @tool
    def buy(self, id: Annotated[int, "number of the item"], n: Annotated[int, "how many"]) -> str:
        """Puts so many of an item into the cart."""
        # More than a task asks for (`MOST`): a `distractor` buys one too many, which is judged wrong and not refused.
        if id not in self._catalogue.values() or not 1 <= n <= 99:
            raise ToolError("no such item, or not that many")
        self._cart[str(id)] = self._cart.get(str(id), 0) + n
        return "ok"

    @tool
    def free(self, day: Annotated[str, "mon to fri"]) -> str:
        """Lists the free hours of a day."""
        if day not in self._free:
            raise ToolError("no such day")
        return " ".join(map(str, self._free[day]))

    @tool
    def book(
        self, day: Annotated[str, "mon to fri"], at: Annotated[int, "hour"], what: Annotated[str, "name of the errand"]
    ) -> str:
        """Writes an errand into the calendar at a free hour."""
        if at not in self._free.get(day, ()):
            raise ToolError("that hour is not free")
        self._free[day].remove(at)
        self._calendar[f"{day} {at}"] = what
        return "ok"

    def state(self) -> dict[str, Any]:
        return {"cart": dict(self._cart), "calendar": dict(self._calendar)}


@dataclass(frozen=True, kw_only=True)
class Shop(GeneratedTasks, ToolWorld):
    """Buy `n` of an item, book an errand at the earliest free hour of a day, or both."""

    kinds: str = "both"
    """Which of `buy`, `book` and `both`, separated by commas. All kinds are equally likely, so the number of tasks that
    can be held out is limited by the kind with the fewest: about a third of its tasks, because training needs the rest.
    `buy` and `book` have few tasks, so with them few can be held out."""
    turns: int = 4

    def __post_init__(self) -> None:
        wrong = [k for k in self.kinds.split(",") if k not in KINDS]
        require(not wrong, self.name, f"kinds={self.kinds!r}: {nearest(wrong[0], KINDS) if wrong else ''}")
        require(2 <= self.turns <= 16, self.name, f"turns={self.turns}: must lie in 2..16")
        rooms = {"buy": len(ITEMS) * MOST, "book": len(ERRANDS) * len(DAYS)}
        rooms["both"] = rooms["buy"] * rooms["book"]
        # All kinds are equally likely, so the kind with the fewest tasks is used up first and limits the total.
        room = min(rooms[k] for k in self._kinds) // 3 * len(self._kinds)
        require(
            self.heldout_count <= room,
            self.name,
            f"heldout={self.heldout_count}, but kinds={self.kinds!r} has room for {room}",
        )

    @property
    def _kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.kinds.split(",")))

    @property
    def name(self) -> str:
        return "shop"

    @property
    def alphabet(self) -> str:
        return 'abcdefghijklmnopqrstuvwxyz0123456789<>[](),="? '

    def draw(self, rng: np.random.Generator, name: str) -> Task:
        """A task. Its key does not include the numbers and hours that only the tools return."""
        kind = self._kinds[int(rng.integers(len(self._kinds)))]
        numbers = rng.choice(np.arange(10, 100), size=len(ITEMS), replace=False)
        catalogue = {item: int(n) for item, n in zip(ITEMS, numbers, strict=True)}
        free = {
            day: sorted(int(h) for h in rng.choice(HOURS, size=int(rng.integers(1, 4)), replace=False)) for day in DAYS
        }
        info: dict[str, Any] = {"catalogue": catalogue, "free": free}
        parts, cart, calendar = [], {}, {}
        if kind != "book":
            info |= {"item": ITEMS[int(rng.integers(len(ITEMS)))], "n": int(rng.integers(1, MOST + 1))}
            parts.append(f"{info['n']} {info['item']}")
            cart[str(catalogue[info["item"]])] = info["n"]
        if kind != "buy":
            info |= {"errand": ERRANDS[int(rng.integers(len(ERRANDS)))], "day": DAYS[int(rng.integers(len(DAYS)))]}
            parts.append(f"{info['errand']} {info['day']}")
            # The hours are sorted, so the first is the earliest.
            calendar[f"{info['day']} {free[info['day']][0]}"] = info["errand"]
        return Task(id=name, prompt=f"<{','.join(parts)}>", answer={"cart": cart, "calendar": calendar}, info=info)

    def box(self, task: Task) -> Toolbox:
        return ShopAndCalendar(task.info["catalogue"], task.info["free"])

    def show(self, results: Sequence[Observation]) -> str:
        """Results as they are. Errors are `[?]`, because their text would need more letters than the alphabet has."""
        return "".join(f"[{r.text}]" if r.kind == "ok" else "[?]" for r in results)

    def verify(self, attempt: Attempt) -> Verdict:
        return graded(attempt.state == attempt.task.answer, attempt.state, attempt.task.answer)

    def key(self, task: Task) -> Key:
        return tuple(task.info.get(part, "") for part in ("n", "item", "errand", "day"))

    def gold(self, task: Task) -> tuple[str, ...]:
        return self._turns(task.info, task.info)

    def distractor(self, task: Task) -> tuple[str, ...]:
        """Everything as asked, but with one item too many, or with another errand."""
        info = task.info
        if "n" in info:
            return self._turns(info, {**info, "n": info["n"] + 1})
        following = ERRANDS[(ERRANDS.index(info["errand"]) + 1) % len(ERRANDS)]
        return self._turns(info, {**info, "errand": following})

    @property
    def styles(self) -> tuple[str, ...]:
        """`tools`: the look-ups, the actions, and `done`."""
        return ("tools",)

    def demonstrate(
        self, task: Task, style: str, rng: np.random.Generator, wrong: float
    ) -> tuple[str, tuple[str, ...]]:
        """(prompt, turns). In a wrong one, other things are bought and booked than asked for."""
        self._check_style(style)
        look_up, action = task.info, task.info
        if rng.random() < wrong:
            for look_up_slip, action_slip in self._slips(task.info, rng):
                look_up, action = {**look_up, **look_up_slip}, {**action, **action_slip}
        return str(task.prompt), self._turns(look_up, action)

    def _slips(
        self, info: Mapping[str, Any], rng: np.random.Generator
    ) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """(changes to what is looked up, changes to what is done), for each part of the task.

        Every part is wrong, because a policy that imitates each part separately could not learn which one is wrong.
        """
        for looked_up, detail, others in (("item", "n", range(1, MOST + 1)), ("day", "errand", ERRANDS)):
            if detail in info and rng.random() < 0.5:
                yield {}, {detail: _another(rng, others, info[detail])}
            elif detail in info:
                other = {looked_up: _another(rng, ITEMS if looked_up == "item" else DAYS, info[looked_up])}
                yield other, other

    def _turns(self, look_up: Any, action: Any) -> tuple[str, ...]:
        """The turns: look-ups of the parts in `look_up`, actions of those in `action`, and `done`."""
        look_ups, actions = [], []
        if "n" in look_up:
            look_ups.append(f'find(item="{look_up["item"]}")')
            actions.append(f"buy(id={look_up['catalogue'][look_up['item']]},n={action['n']})")
        if "errand" in look_up:
            look_ups.append(f'free(day="{look_up["day"]}")')
            actions.append(
                f'book(day="{action["day"]}",at={look_up["free"][look_up["day"]][0]},what="{action["errand"]}")'
            )
        return f"[{','.join(look_ups)}]", f"[{','.join(actions)}]", "done"


def _another(rng: np.random.Generator, values: Sequence[Any] | range, value: Any) -> Any:
    """A random one of the values other than `value`."""
    others = [v for v in values if v != value]
    return others[int(rng.integers(len(others)))]
