"""Acts on everything that a filter finds, at a rate, with a result for each. Imports records only."""
