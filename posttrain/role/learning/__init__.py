"""Parts of the learner's side of a step beside the batch: demonstrations, references, teachers, replayed groups."""
