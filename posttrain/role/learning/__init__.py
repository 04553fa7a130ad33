"""What the learner's side of a step needs beside the batch: demonstrations, references, teachers, replayed groups."""
