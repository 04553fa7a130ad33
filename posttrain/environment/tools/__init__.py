"""Tools for the policy: what it may call, what it is shown, and the loop between the two."""
