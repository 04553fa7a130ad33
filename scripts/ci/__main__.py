"""python3 -m scripts.ci COMMAND, with nothing but Python's own library.

plan        print what CI would run on this tree, and run nothing
run         run it (what .ci/run calls)
everything  run all suites and print their seconds
keep        write the seconds measured last into the table, and the table into CONTRIBUTING.md
table       write the table into CONTRIBUTING.md
landing     write the plan of this tree into the record; `landing COMMIT` says what landed last
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from scripts.ci import ledger, page, play
from scripts.ci.plan import Plan, all_of, words
from scripts.ci.reach import seed
from scripts.ci.suites import TABLE, Table, TableError

ROOT = Path(__file__).parents[2]


def current(table: Table) -> tuple[Plan, str]:
    plan, trouble = ledger.current(table)
    print(
        f"landing {plan.landing}\n{words(plan, table.minutes)}" + (f"\nnote: {trouble}" if trouble else ""), flush=True
    )
    return plan, trouble


def show(table: Table) -> int:
    current(table)
    return 0


def run(table: Table) -> int:
    plan, trouble = current(table)
    code = play.run(plan, table)
    if trouble:
        print(f"note: {trouble}", flush=True)
    return code


def everything(table: Table) -> int:
    code = play.run(all_of(table.suites, seed(table.root)), table, everything=True)
    print("these seconds into the table and CONTRIBUTING.md: python3 -m scripts.ci keep")
    return code


def keep(table: Table) -> int:
    path = table.root / play.MEASURED
    if not path.exists():
        return play.stop(f"{play.MEASURED} does not exist; run `make everything` first")
    text = play.keep(table, json.loads(path.read_text()))
    (table.root / TABLE).write_text(text)
    return write_table(Table.read(table.root))


def write_table(table: Table) -> int:
    path = table.root / page.PAGE
    path.write_text(page.with_table(path.read_text(), table))
    return 0


def landing(table: Table, *commit: str) -> int:
    since = commit[0] if commit else ledger.landed(table.root)
    if not ledger.git(table.root, "rev-parse", "--verify", "--quiet", f"{since}^{{commit}}"):
        return play.stop("what landed last is not known here; say its commit: python3 -m scripts.ci landing COMMIT")
    if changed := ledger.git(table.root, "status", "--porcelain", "--", ".", f":!{ledger.LEDGER}"):
        return play.stop(f"commit or remove these first, the plan is of what is committed:\n{changed}")
    landings, plan = ledger.next_landing(table, since)
    (table.root / ledger.LEDGER).write_text(ledger.written(landings))
    print(f"landing {plan.landing}, after {ledger.git(table.root, 'log', '-1', '--format=%h %s', since)}")
    print(words(plan, table.minutes))
    print(f"now: git add {ledger.LEDGER} && git commit -m 'Plan of landing {plan.landing}'")
    if plan.seconds > 60 * table.minutes:
        print(f"note: this is above {table.minutes:g} minutes: too much is due at once")
    return 0


COMMANDS = {"plan": show, "run": run, "everything": everything, "keep": keep, "table": write_table, "landing": landing}


def main(words: list[str]) -> int:
    if not words or words[0] not in COMMANDS or len(words) > 1 + (words[0] == "landing"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return COMMANDS[words[0]](Table.read(ROOT), *words[1:])
    except TableError as error:
        return play.stop(str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
