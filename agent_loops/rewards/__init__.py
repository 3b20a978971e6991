"""Rewards in the box: rules, programs run on test cases, reward models and judges. One file each; docs/rewards.md."""
