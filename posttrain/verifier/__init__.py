"""Verifiers: what an answer is worth. Text in, verdicts out; programs that a policy wrote run in the sandbox alone."""
