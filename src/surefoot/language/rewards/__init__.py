"""What responses earn: functions, servers, reward models, and sums of them."""
