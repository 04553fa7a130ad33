"""`posttrain plan`: what a run will take of a machine, before anything is loaded."""

from __future__ import annotations

from argparse import Namespace
from typing import get_args

from posttrain.cli.shared_arguments import Subparsers, add_command
from posttrain.config.rank_limits import Parallel
from posttrain.system.errors import ConfigError


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "plan",
        plan,
        "memory and time of a stage before anything is loaded: does it fit, what fills the memory when, how long a "
        "step takes and why, what to change first",
        "posttrain plan grpo model=Qwen2.5-0.5B machine=H100\n"
        "  posttrain plan grpo model=Qwen2.5-7B machine=8xH100 rl.sampling.max_tokens=4096 --answer 1500\n"
        "  posttrain plan sft model=Qwen2.5-1.5B machine=RTX-4090 --fit context\n"
        "  posttrain plan grpo model=Qwen2.5-7B machine=8xH100 placement=processes --sweep staleness=0,1,2,4\n"
        "  posttrain plan --forces",
    )
    p.usage = "posttrain plan RECIPE [key=value ...] [machine=NAME] [options]"
    p.add_argument("recipe", nargs="?", help="as of posttrain run; model= may also be the name of a known model")
    p.add_argument(
        "--stage", metavar="NAME", help="the stage that is planned (default: the last that learns from reward)"
    )
    p.add_argument("--prompt", type=int, metavar="TOKENS", help="tokens of a prompt (default: 256, assumed)")
    p.add_argument(
        "--answer", type=int, metavar="TOKENS", help="mean tokens of an answer (default: half of the longest)"
    )
    p.add_argument("--spread", type=float, metavar="X", help="standard deviation of answers, in means (default: .5)")
    p.add_argument("--nproc", type=int, metavar="N", help="ranks that train together (default: all devices)")
    p.add_argument("--replicas", type=int, default=1, metavar="R", help="copies of the weights among the ranks")
    p.add_argument("--parallel", choices=get_args(Parallel), default="rows", help="how ranks share the model")
    p.add_argument("--reward", type=float, default=0.0, metavar="SECONDS", help="time to judge one answer (default: 0)")
    p.add_argument("--judges", type=int, default=1, metavar="N", help="answers that are judged at once")
    p.add_argument("--kept", type=float, default=1.0, metavar="SHARE", help="share of groups that a filter keeps")
    p.add_argument("--accepted", type=float, default=0.0, metavar="P", help="chance that a drafted token is accepted")
    p.add_argument("--fit", metavar="WHAT", help="find the largest model, context, siblings or batch that fits")
    p.add_argument(
        "--sweep", metavar="KNOB=A,B", help="simulate each value of a setting: who waits for whom, how old tokens are"
    )
    p.add_argument("--out", metavar="FILE", help="with --sweep: also a picture (.svg, .png or .pdf)")
    p.add_argument("--forces", action="store_true", help="from signal, estimator and cost to a recipe, as a table")
    p.add_argument("--probe", action="store_true", help="measure this machine once (5 s) and keep the figures")
    p.add_argument(
        "--against", metavar="RUN", help="a run beside its plan: memory by role, the five times, the residual"
    )
    p.add_argument("--budget", metavar="RUN", help="what to make faster first in this run, by what each change brings")
    p.add_argument(
        "--calibrate", metavar="RUN", help="multiply times by measured / predicted of this run's first steps"
    )
    p.add_argument("--machines", metavar="64xH100", help="find a layout for these devices: who samples, learns, and K")
    p.add_argument("--days", type=float, default=7.0, metavar="D", help="with --machines: days that there are")
    p.add_argument("--json", action="store_true", help="print JSON")


def plan(o: Namespace) -> int:
    from posttrain.cli import plan as view

    if o.forces:
        view.forces()
        return 0
    if o.probe:
        from posttrain.api.machine_speed import probe

        view.probed(probe())
        return 0
    # These two read the settings from a run folder, so no recipe is needed.
    if o.against is not None or o.budget is not None:
        from posttrain.cli import plan_of_run

        plan_of_run.against(o) if o.against is not None else plan_of_run.budget(o)
        return 0
    if o.recipe is None:
        raise ConfigError("no recipe given: posttrain plan RECIPE machine=NAME; posttrain run --help lists recipes")
    view.show(o)
    return 0
