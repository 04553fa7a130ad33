"""Finds the program among the blocks of a response. It runs in the sandbox, because it parses what a policy wrote.

There it is a separate program (`python assemble.py < request`), so it imports only the standard library. A request is
JSON: `blocks`, a list of [marked as Python, source]; `bare`, whether the one block is a text with words around the
code; and `wanted`, the names that the tests call. Nothing of it reveals what a test expects. The answer is the program,
as JSON.

1. The main block is the last one that defines a wanted name, and blocks marked as Python come first. Blocks that only
   use the name (usage, tests, output, a fragment, another language) are skipped. If the tests give input, the main
   block is the last one that reads input.
2. Names that the main block uses and does not define are taken from the other blocks: the statement that defines each,
   and what that statement needs. Nothing else of those blocks runs.
3. Lines of prose around bare code are left out.
"""

from __future__ import annotations

import ast
import builtins
import json
import keyword
import re
import symtable
import sys
import textwrap
from collections.abc import Iterable, Iterator

KNOWN = {*dir(builtins), "__name__", "__file__", "__doc__", "__builtins__"}
"""Names that every module has."""
MOST_DROPPED = 200
"""The most lines of prose that are removed around bare code."""

_DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_PROVIDING = (*_DEFINITION, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.If, ast.Try)
# A program that reads its input: `input(`, `sys.stdin`, `open(0`.
_READS = re.compile(r"\binput\s*\(|\bstdin\b|\bfileinput\b|\bopen\s*\(\s*0\b")
# Lines that are code although they may look like words: `def f(`, `class A:`, `@cache`, `import a`, `from a import b`.
_CODE = re.compile(r"(?:def|class)\s+\w+\s*[(:]|@\w|import\s+\w|from\s+[\w.]+\s+import\b")
# A word of prose (`don't`), and what may stand between two words: spaces with punctuation and Markdown (`, **`).
_WORD = r"[^\W\d_][\w'’-]*"
_GAP = r"[*_`\"”)]*[,;:.!?]*[*_`\"”]*\s+[*_`\"“(]*"
# Three words in a row with only punctuation and Markdown between them. `for x in` matches too, but only lines that a
# syntax error names are tested.
_SENTENCE = re.compile(rf"{_WORD}(?:{_GAP}{_WORD}){{2}}")
# Two words (`Hello world`), or one word with a stop after it (`Solution:`). Group 1: the first word.
_PHRASE = re.compile(rf"\W*({_WORD})(?:{_GAP}{_WORD}\W*|.*[:.!?。：！？]\W*)")
_RULE = re.compile(r"[-=*_~\s]+")


class Part:
    """One block: its source without the prompts of an interpreter, and its statements (None if it does not parse)."""

    def __init__(self, marked: bool, source: str) -> None:
        self.marked = marked
        self.source = unprompted(source)
        self.tree = parsed(self.source)

    def defines(self, names: Iterable[str], imports: bool) -> bool:
        """Returns whether the block defines one of the names. With `imports`, an import counts too. A block that does
        not parse is searched for the text of a definition."""
        # A block that is cut off does not parse, and still counts as the last version of the program. Otherwise an
        # earlier version, which the policy gave up, would be judged.
        if self.tree is None:
            text = textwrap.dedent(self.source)
            return any(
                re.search(rf"^(?:async\s+)?(?:def|class)\s+{re.escape(name)}\b", text, re.MULTILINE) for name in names
            )
        return any(
            name in names and (imports or not isinstance(s, ast.Import | ast.ImportFrom))
            for name, s in bound(self.tree.body)
        )

    @property
    def reads(self) -> bool:
        """True where the block reads the program's input."""
        return _READS.search(self.source) is not None

    @property
    def acts(self) -> bool:
        """True where the block does more than define names when it runs."""
        defining = (*_DEFINITION, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Assert)
        return self.tree is None or any(
            not isinstance(s, defining) and not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
            for s in self.tree.body
        )


def chosen(blocks: list[tuple[bool, str]], wanted: list[str]) -> str:
    """The program, from fenced blocks.

    >>> chosen([(True, "import math"), (True, "def f(n): return math.sqrt(n)"), (True, "assert f(4) == 2")], ["f"])
    'import math\\ndef f(n): return math.sqrt(n)'
    """
    parts = [Part(marked, source) for marked, source in blocks]
    main = _defining(parts, wanted) if wanted else _reading(parts)
    if main is None:
        main = ([p for p in parts if p.marked] or parts)[-1]
    return _completed(main, parts, wanted)


def _defining(parts: list[Part], wanted: list[str]) -> Part | None:
    """The last block that defines a wanted name, marked blocks first; None if there is none."""
    # `from solution import f` in a block of tests binds the name too, so imports count last.
    for imports in (False, True):
        for marked in (True, False):
            if defining := [p for p in parts if p.marked is marked and p.defines(wanted, imports)]:
                return defining[-1]
    return None


def _reading(parts: list[Part]) -> Part | None:
    """The last block that reads input. If it only defines functions, the first later block that uses them."""
    # Output and shell sessions are seldom marked as Python, so other blocks count only where none is.
    marked = [p for p in parts if p.marked] or parts
    readers = [p for p in marked if p.reads]
    if not readers:
        return None
    last = readers[-1]
    if last.acts or last.tree is None:
        return last
    # `def solve(): ... input()` reads only if it is called, perhaps in a later block. `_completed` adds the function.
    names = {name for name, _ in bound(last.tree.body)}
    users = [p for p in marked[marked.index(last) + 1 :] if p.tree is not None and p.acts and names & missing(p.source)]
    return users[0] if users else last


def _completed(main: Part, parts: list[Part], wanted: list[str]) -> str:
    """The main block, after the statements of other blocks that define what it needs."""
    if main.tree is None:
        return main.source
    # The main block was most likely written for the last definition before it, so the blocks before it are searched
    # backwards, and then those after it.
    main_place = parts.index(main)
    order = [*reversed(range(main_place)), *range(main_place + 1, len(parts))]
    defined = {name for name, _ in bound(main.tree.body)}
    # By (block, index of the statement), so that they can be sorted into the order of the response.
    statements: dict[tuple[int, int], str] = {}
    needed = sorted((missing(main.source) | set(wanted)) - defined)
    seen = set(needed) | defined
    # For each needed name one statement is added, and then what it needs in its turn. `seen` ends circles.
    while needed:
        name = needed.pop()
        place = next((p for i in order if (p := _provider(i, parts[i], name)) is not None), None)
        if place is None or place in statements:
            continue
        tree = parts[place[0]].tree
        assert tree is not None
        statements[place] = ast.unparse(tree.body[place[1]])
        new_names = missing(statements[place]) - seen
        seen |= new_names
        needed += sorted(new_names)
    lines = main.source.split("\n")
    # `from __future__` has to stay at the top of a program.
    future = [s for s in main.tree.body if isinstance(s, ast.ImportFrom) and s.module == "__future__"]
    top = max((s.end_lineno or 0 for s in future), default=0)
    return "\n".join([*lines[:top], *(statements[place] for place in sorted(statements)), *lines[top:]])


def _provider(block: int, part: Part, name: str) -> tuple[int, int] | None:
    """(block, index of the statement) of a block's last statement that defines a name, as `import *` may; else None."""
    if part.tree is None:
        return None
    # Only definitions are taken: the guard of a script (`if __name__ == ...`) holds calls and tests of its own.
    for i, statement in reversed(list(enumerate(part.tree.body))):
        defines = isinstance(statement, _PROVIDING) and not _guarded(statement)
        if defines and any(n in (name, "*") for n, _ in bound([statement])):
            return block, i
    return None


def _guarded(statement: ast.stmt) -> bool:
    """Returns whether the statement is `if __name__ == "__main__":`."""
    return isinstance(statement, ast.If) and any(
        isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(statement.test)
    )


def bound(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """(name, statement) for all names that statements bind in the module, also inside `if`, `for`, `with` and `try`."""
    for s in body:
        if isinstance(s, _DEFINITION):
            yield s.name, s
        elif isinstance(s, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], s) for alias in s.names)
        elif isinstance(s, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.With):
            if isinstance(s, ast.With):
                targets = [i.optional_vars for i in s.items]
            else:
                targets = s.targets if isinstance(s, ast.Assign) else [s.target]
            # `x: int` declares a name and gives it no value.
            if not (isinstance(s, ast.AnnAssign) and s.value is None):
                yield from ((n.id, s) for t in targets if t is not None for n in ast.walk(t) if isinstance(n, ast.Name))
        # What a function or a class binds inside is not a name of the module.
        for inner in ("body", "orelse", "finalbody"):
            if not isinstance(s, _DEFINITION):
                yield from bound(getattr(s, inner, []))
        for handler in getattr(s, "handlers", []):
            yield from bound(handler.body)


def missing(source: str) -> set[str]:
    """The names that a source reads from its module and does not bind there."""
    # The compiler's table of names knows scopes. Of an inner one, only names that it reads as globals count.
    top = symtable.symtable(source, "program", "exec")
    read, tables = set[str](), [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        read |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (table is top or s.is_global())}
    bound_names = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    return read - bound_names - KNOWN


def unprompted(source: str) -> str:
    """An interpreter session as the program that was typed. Any other source is returned as it is."""
    if not source.lstrip().startswith(">>>"):
        return source
    # Lines without a prompt are what the interpreter printed.
    lines = [line.strip() for line in source.split("\n")]
    return "\n".join(line[4:] for line in lines if line.startswith((">>> ", "... ")) or line == "...")


def bare(text: str) -> str:
    """The code of a text without its lines of prose. The text as it is, if the rest is not Python.

    >>> bare("Here it is:\\n\\ndef f():\\n    return 1\\n\\nThat is all.").strip()
    'def f():\\n    return 1'
    """
    lines = unprompted(text).split("\n")
    # Each round parses the text. A line of prose with the syntax error is made empty, so that line numbers stay.
    for _ in range(MOST_DROPPED):
        rest = textwrap.dedent("\n".join(lines))
        try:
            tree = ast.parse(rest)
        except (ValueError, RecursionError, MemoryError):
            return text
        except SyntaxError as error:
            suspects = [min((error.lineno or 1) - 1, len(lines) - 1)]
            # Wrong indentation may come from a line of prose at the margin, which need not be the reported line.
            if isinstance(error, IndentationError):
                suspects += [i for i, line in enumerate(lines) if line[:1].strip()]
            prose_line = next((i for i in suspects if prose(lines[i])), None)
            if prose_line is None:
                return text
            lines[prose_line] = ""
            continue
        # A text of names and labels only, such as `Done`, happens to parse and is no program.
        wordy = [s for s in tree.body if _says_nothing(s)]
        if len(wordy) == len(tree.body):
            return text
        kept_lines = rest.split("\n")
        for s in wordy:
            kept_lines[s.lineno - 1 : s.end_lineno] = [""] * ((s.end_lineno or s.lineno) - s.lineno + 1)
        return "\n".join(kept_lines)
    return text


def prose(line: str) -> bool:
    """Returns whether a line that does not parse is prose: three words in a row; or two words, or one with a stop after
    it, and no sign of code.

    >>> [prose(line) for line in ("It returns a + b.", "Solution:", "else:", "def add(a, b)", "x = = 3")]
    [True, True, False, False, False]
    """
    line = line.strip()
    if not line or _CODE.match(line):
        return False
    if _RULE.fullmatch(line) or _SENTENCE.search(line):
        return True
    words = _PHRASE.fullmatch(line)
    code = "=" in line or re.search(r"\w\(", line) is not None
    return words is not None and not keyword.iskeyword(words[1]) and not code


def _says_nothing(statement: ast.stmt) -> bool:
    """Returns whether the statement is prose that happens to parse: `Done`, `Note: this`."""
    if isinstance(statement, ast.AnnAssign):
        return statement.value is None
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Name)


def parsed(source: str) -> ast.Module | None:
    """The syntax tree of a source; None if Python cannot compile it."""
    try:
        tree = ast.parse(source)
        # `missing` also fails for sources that only the parser accepts, such as two arguments with one name.
        missing(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree


if __name__ == "__main__":
    request = json.load(sys.stdin)
    if request["bare"]:
        program = bare(request["blocks"][0][1])
    else:
        program = chosen([(m, s) for m, s in request["blocks"]], request["wanted"])
    json.dump(program, sys.stdout)
