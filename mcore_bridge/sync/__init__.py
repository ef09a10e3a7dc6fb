"""The trainer's side of a weight sync: one object that finds its engines and the best way to each."""
