"""The stage that samples, keeps what is right and imitates it, and its checks."""
