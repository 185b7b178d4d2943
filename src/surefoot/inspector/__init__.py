"""See a run: the clip table as one page, and a local server that shows every level of the staircase."""
