"""The program `posttrain` of the fresh environment, started once: each line of standard input is a command for a
process that is forked from here, where what takes seconds to import is imported already. The answer is its exit code.
"""

import importlib
import json
import os
import sys
import traceback

IMPORTED = (
    "torch",
    "transformers.models.qwen3.modeling_qwen3",
    "posttrain.api.session",
    "posttrain.build.build_run",
    "posttrain.cli",
)


def command(asked: dict) -> int:
    """One command in this process, as the installed script runs it: in a folder, with an environment, its output in a
    file, and nobody at the keyboard."""
    from posttrain.cli import main

    written = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream, now in ((0, os.open(os.devnull, os.O_RDONLY)), (1, written), (2, written)):
        os.dup2(now, stream)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environ"])
    sys.argv = asked["words"]
    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def listen() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            os._exit(command(json.loads(line)))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    listen()
