"""The steps of the learner as compiled programs, and what compiles them."""
