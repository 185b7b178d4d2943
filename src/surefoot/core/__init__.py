"""The parts of every algorithm, in control and language: rollout, credit, objective, update, loop."""
