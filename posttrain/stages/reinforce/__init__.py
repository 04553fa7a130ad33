"""The stage that learns from reward: rollouts, credit, one or more optimizer steps."""
