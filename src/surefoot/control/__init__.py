"""Control: agents in Gymnasium environments. What is particular here is where actions go and rewards come from."""
