"""A learner over several processes: rows (FSDP2), tensors, experts; its checkpoints, references and proofs.

Begin with `sharded_learner`; `ranks` is how the processes meet and talk.
"""
