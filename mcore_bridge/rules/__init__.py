"""What becomes what: layouts, names and rules, as data. It imports ``errors`` alone."""
