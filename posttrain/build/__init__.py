"""From a `Run` to its parts: models, engines, environments, judges. Nothing else makes a model or an engine.

Begin with `build_run`; `preflight_checks` says what is tested before the first step; `open_model` is the way from a run
folder or a model directory to its weights.
"""
