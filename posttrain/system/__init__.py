"""Access to this machine and its files: errors, text for a terminal, files, processes, foreign input.

Every other room stands on this one. Begin with `errors` (who has to act) and `files` (how a folder is written so that a
kill loses nothing). Text from elsewhere is read by `read_untrusted` and printed by `terminal_output`, and nowhere else.
`worker_threads` is under every pool of processes that run untrusted code.
"""
