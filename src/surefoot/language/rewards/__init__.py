"""Rewards of responses: functions, servers, reward models, and sums of them."""
