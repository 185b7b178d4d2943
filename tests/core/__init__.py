"""Laws of the core: the ladder, credit, the learner and the loop; and learning in the smallest worlds there are."""
