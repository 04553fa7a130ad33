"""The stage that imitates demonstrations, and its checks."""
