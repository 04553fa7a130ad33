"""Decides whether the ranks of a run read their model by rows (`engine.parallel.sharded_load`), or rank 0 reads all of
it and sends it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from posttrain.build.request.branch import run_source
from posttrain.config.engines import VLLM
from posttrain.config.placement import Local, Ray
from posttrain.config.rank_limits import Parallel
from posttrain.config.run import Model, Run
from posttrain.engine.adapters.saved_adapter import saved_adapter
from posttrain.engine.parallel.sharded_load import BlankPolicy, blank_policy
from posttrain.stages.ranks import rank_state as together
from posttrain.stages.ranks.rank_lead import RankLead
from posttrain.system.errors import ConfigError, DataError

HERE = "the engine in this process"
SENT = "rank 0 reads the whole model, and every rank gets all of it before it keeps its rows"


def here(model: Model) -> Model:
    """The model, with the absolute path of its directory."""
    return replace(model, path=str(Path(model.path or "").expanduser().resolve()))


def choose_reading(run: Run, lead: RankLead) -> tuple[BlankPolicy | None, tuple[str, ...]]:
    """(the policy without memory where no process of the run but an engine needs a whole copy, lines for people). Sets
    `lead.by_rows`."""
    if run.model.path is None:
        return None, ()
    if why := _why_whole(run, lead.parallel):
        return None, (f"note: {SENT}: {why}",)
    try:
        blank = blank_policy(run.model, run.seed)
    except (ConfigError, DataError) as error:
        return None, (f"note: {SENT}: {error}",)
    if strange := blank.files.strange(blank.module):
        named = f"{', '.join(strange[:3])} is in its files under another name, or not at all"
        return None, (f"note: {SENT}: {named}",)
    seen = lead.all(together.see_files, str(blank.files.folder.resolve()))
    if others := [rank for rank, digest in enumerate(seen) if digest != seen[0]]:
        where = f"rank {others[0]} does not see the same files in {blank.files.folder}"
        return None, (f"note: {SENT}: {where}",)
    lead.by_rows = True
    whole = _who_is_whole(run)
    return None if whole == HERE else blank, (f"each rank reads its rows of {run.model.path}; whole copies: {whole}",)


def _who_is_whole(run: Run) -> str:
    """Returns the name of the process that has a whole copy of the model."""
    if isinstance(run.engine, VLLM):
        return "the vLLM server"
    return HERE if isinstance(run.placement, Local) else "the engines in processes of their own"


def _why_whole(run: Run, parallel: Parallel) -> str:
    """Returns the reason why rows cannot be read, as far as the settings tell; '' where they can."""
    path = run.model.path or ""
    if not Path(path).expanduser().is_dir():
        return f"model={path} is no directory here"
    if run_source(path) is not None:
        return f"model={path} is the folder of a run"
    if saved_adapter(path) is not None:
        return f"model={path} is an adapter"
    if parallel != "rows":
        return f"--parallel {parallel} cuts whole layers, of which no rank reads rows"
    if run.model.trust_remote_code:
        return "model.trust_remote_code=true, and code of the model's own may build it as it likes"
    if isinstance(run.engine, VLLM) and run.model.lora is not None:
        return "vLLM gets the weights beneath an adapter from rank 0 (engine=embedded reads them by itself)"
    if isinstance(run.engine, VLLM) and not isinstance(run.placement, Local):
        return "engines of vLLM in processes of their own get the model from rank 0 (a server of vLLM does not)"
    if isinstance(run.placement, Ray):
        return "engines on a cluster get the model from rank 0 (placement=processes reads it by itself)"
    return ""
