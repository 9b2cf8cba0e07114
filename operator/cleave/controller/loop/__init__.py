"""What the operator does when traffic moves: it watches, plans anew, and says why."""
