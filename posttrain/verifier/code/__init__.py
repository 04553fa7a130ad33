"""Programs judged by tests."""
