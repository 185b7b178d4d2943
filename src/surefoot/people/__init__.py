"""People compare answers: the queue of pairs, the log of each person, the page, and how well people agree."""
