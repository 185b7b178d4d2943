"""What every algorithm is made of, in both worlds: rollout, credit, objective, update, loop."""
